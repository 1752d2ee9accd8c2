/* SPDX-License-Identifier: BSD-3-Clause */
/* fast_forward.c: schedules by what is ready: dX before F before dW (out-of-order backprop,
 * arXiv 2110.00929).
 *
 * The tasks of a kind and a layer run in the order of their batches. Of all processes the one that
 * can start a task first runs it: what another one does later can't make a task ready before. */
#include "planners/pipeline/fast_forward.h"

#include <stdlib.h>

#include "fail.h"
#include "planners/pipeline/events.h"

/* A batch on a process. */
typedef struct open_batch {
    uint32_t left; /* gradient tasks */
    bool begun;
} open_batch;

/* The task that a process would run next. */
typedef struct choice {
    of_pipeline_task task;
    of_wait wait;
    bool found;
} choice;

typedef struct forwarding {
    of_events events;
    size_t n;            /* tasks so far */
    size_t *next;        /* of each layer and kind, its next batch */
    open_batch *batches; /* of each process and batch */
    size_t *open;        /* of each process, batches begun and not ended */
    choice *choices;     /* of each process */
} forwarding;

static size_t *next_of(const forwarding *f, int kind, size_t layer) {
    return &f->next[layer * OF_TASK_KINDS + (size_t)kind];
}

static open_batch *batch_on(const forwarding *f, const of_pipeline_task *task) {
    return &f->batches[(size_t)task->process * f->events.batches + (size_t)task->batch];
}

/* The updates of the groups before have been made, and the batch is open or may begin. */
static bool may_forward(const forwarding *f, const of_pipeline_task *task) {
    const of_pipeline *p = f->events.p;
    const size_t group = (size_t)task->batch / p->micro_batches * p->micro_batches;
    if (p->layers[task->layer].weight_bytes &&
        *next_of(f, OF_TASK_WEIGHT_GRADIENT, (size_t)task->layer) < group)
        return false;
    return batch_on(f, task)->begun || !p->in_flight || f->open[task->process] < p->in_flight;
}

/* Smaller is more urgent; F that have come furthest first, gradients by batches and from the top.
 */
static bool is_more_urgent(const of_pipeline_task *a, const of_pipeline_task *b) {
    static const int ranks[] = {1, 0, 0, 2, 3};
    if (ranks[a->kind] != ranks[b->kind])
        return ranks[a->kind] < ranks[b->kind];
    if (a->kind != OF_TASK_FORWARD && a->batch != b->batch)
        return a->batch < b->batch;
    return a->layer > b->layer;
}

/* Times that differ by rounding alone are the same. */
static bool is_better(const choice *a, const choice *b) {
    if (!b->found)
        return true;
    if (a->wait.until < b->wait.until * (1 - 1e-9))
        return true;
    if (b->wait.until < a->wait.until * (1 - 1e-9))
        return false;
    return is_more_urgent(&a->task, &b->task);
}

static void consider(const forwarding *f, choice *best, int kind, size_t layer) {
    const of_events *e = &f->events;
    const size_t batch = *next_of(f, kind, layer);
    if (batch >= e->batches || !of_has_task(e->p, e->first_trained, kind, layer))
        return;
    choice found = {.task = {.kind = kind,
                             .layer = (int32_t)layer,
                             .batch = (int32_t)batch,
                             .process = of_process_of(&e->p->places[layer], kind, batch)},
                    .found = true};
    if (kind == OF_TASK_FORWARD && !may_forward(f, &found.task))
        return;
    found.wait = of_wait_of(e, &found.task);
    if (!found.wait.never && is_better(&found, best))
        *best = found;
}

static void choose(forwarding *f, size_t process) {
    choice best = {.found = false};
    for (size_t i = 0; i < f->events.p->n; i++)
        if ((size_t)f->events.p->places[i].forward == process)
            for (int kind = 0; kind < OF_TASK_UPDATE; kind++)
                consider(f, &best, kind, i);
    f->choices[process] = best;
}

static void emit(forwarding *f, of_pipeline_task task) {
    const of_wait wait = of_wait_of(&f->events, &task);
    of_pipeline_task *made = &f->events.tasks[f->n];
    *made = task;
    *of_index_of(&f->events, task.kind, (size_t)task.layer, (size_t)task.batch) = f->n++;
    of_run(&f->events, made, &wait);
}

static bool ends_group(const forwarding *f, size_t batch) {
    return (batch + 1) % f->events.p->micro_batches == 0 || batch + 1 == f->events.batches;
}

static void count_batch(forwarding *f, const of_pipeline_task *task) {
    open_batch *batch = batch_on(f, task);
    if (!batch->begun && batch->left)
        f->open[task->process]++;
    batch->begun = true;
    if (task->kind != OF_TASK_FORWARD && --batch->left == 0)
        f->open[task->process]--;
}

static void run_on(forwarding *f, size_t process) {
    const of_pipeline_task task = f->choices[process].task;
    emit(f, task);
    ++*next_of(f, task.kind, (size_t)task.layer);
    count_batch(f, &task);
    if (task.kind == OF_TASK_WEIGHT_GRADIENT && ends_group(f, (size_t)task.batch)) {
        of_pipeline_task update = task;
        update.kind = OF_TASK_UPDATE;
        emit(f, update);
    }
    choose(f, process);
    const of_pipeline_place *places = f->events.p->places;
    if (task.layer > 0) /* whom a gradient, and a forward's output, makes ready */
        choose(f, (size_t)places[task.layer - 1].forward);
    if ((size_t)task.layer + 1 < f->events.p->n)
        choose(f, (size_t)places[task.layer + 1].forward);
}

/* processes: none has anything left to run. */
static size_t first_to_start(const forwarding *f) {
    size_t first = f->events.p->processes;
    for (size_t q = 0; q < f->events.p->processes; q++)
        if (f->choices[q].found && (first == f->events.p->processes ||
                                    f->choices[q].wait.until < f->choices[first].wait.until))
            first = q;
    return first;
}

static void count_gradients(forwarding *f) {
    const of_events *e = &f->events;
    for (size_t i = 0; i < e->p->n; i++)
        for (int kind = OF_TASK_INPUT_GRADIENT; kind < OF_TASK_UPDATE; kind++)
            for (size_t b = 0; of_has_task(e->p, e->first_trained, kind, i) && b < e->batches; b++)
                f->batches[(size_t)e->p->places[i].forward * e->batches + b].left++;
}

static void forward_fast(forwarding *f) {
    const size_t processes = f->events.p->processes;
    count_gradients(f);
    for (size_t q = 0; q < processes; q++)
        choose(f, q);
    for (size_t q; (q = first_to_start(f)) < processes;)
        run_on(f, q);
    for (size_t k = 0; k < f->n; k++)
        f->events.tasks[k].start = f->events.tasks[k].end = 0;
}

of_status of_schedule_fast_forward(const of_pipeline *p, const of_network_link *link,
                                   size_t batches, of_pipeline_task *tasks) {
    forwarding f = {.next = calloc(p->n, OF_TASK_KINDS * sizeof *f.next),
                    .batches = calloc(p->processes, batches * sizeof *f.batches),
                    .open = calloc(p->processes, sizeof *f.open),
                    .choices = calloc(p->processes, sizeof *f.choices)};
    of_status status = of_events_begin(&f.events, p, link, batches, tasks);
    if (status == OF_OK && !(f.next && f.batches && f.open && f.choices))
        status = of_fail(OF_NO_MEMORY, "out of memory for a schedule of %zu batches", batches);
    if (status == OF_OK)
        forward_fast(&f);
    of_events_release(&f.events);
    free(f.next);
    free(f.batches);
    free(f.open);
    free(f.choices);
    return status;
}
