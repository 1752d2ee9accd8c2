/* SPDX-License-Identifier: BSD-3-Clause */
/* simulate.c: when the tasks of a schedule run, and what is sent between processes. */
#include <stdlib.h>
#include <string.h>

#include "fail.h"
#include "planners/pipeline/tasks.h"

#define NO_TASK SIZE_MAX

typedef struct simulation {
    const of_pipeline *p;
    const of_network_link *link;
    size_t first_trained;
    size_t batches;
    of_pipeline_task *tasks;
    size_t n;
    size_t *index;   /* of the task of each kind, layer and batch; NO_TASK: there is none */
    size_t *queue;   /* the tasks by processes, each in its order */
    size_t *next;    /* of each process, its place in the queue; they end where the next began */
    size_t *ends;    /* of each process */
    double *free_at; /* of each process */
    double messages, bytes;
} simulation;

/* The events that a task waits for, as far as they are known. */
typedef struct wait {
    const of_pipeline_task *task;
    double until;
    double messages, bytes;
    bool never; /* something has not run yet */
} wait;

static size_t *index_of(const simulation *s, int kind, size_t layer, size_t batch) {
    return &s->index[(batch * s->p->n + layer) * OF_TASK_KINDS + (size_t)kind];
}

/* The task that is needed; NULL: it has not run yet, and the task has to wait. */
static const of_pipeline_task *done(const simulation *s, wait *w, int kind, size_t layer,
                                    size_t batch) {
    const size_t found = *index_of(s, kind, layer, batch);
    if (found != NO_TASK && s->tasks[found].end >= 0)
        return &s->tasks[found];
    w->never = true;
    return NULL;
}

/* is_first: no task before this one has had the message sent to its process. */
static void wait_for(const simulation *s, wait *w, const of_pipeline_task *needed, double bytes,
                     bool is_first) {
    if (!needed)
        return;
    double there = needed->end;
    if (needed->process != w->task->process) {
        there += s->link->latency + bytes * s->link->seconds_per_byte;
        w->messages += is_first;
        w->bytes += is_first ? bytes : 0;
    }
    w->until = of_later(w->until, there);
}

/* Whether no gradient of the layer that comes before this kind is on the same process. */
static bool is_first_there(const simulation *s, const of_pipeline_task *task) {
    const of_pipeline_place *place = &s->p->places[task->layer];
    for (int kind = OF_TASK_INPUT_GRADIENT; kind < task->kind; kind++)
        if (of_has_task(s->p, s->first_trained, kind, (size_t)task->layer) &&
            of_process_of(place, kind, (size_t)task->batch) == task->process)
            return false;
    return true;
}

static void wait_for_output_gradient(const simulation *s, wait *w, size_t layer, size_t batch) {
    const double bytes = (double)s->p->layers[layer].out_bytes;
    const of_pipeline_place *above = &s->p->places[layer + 1];
    const double share = of_first_share(&s->p->layers[layer + 1], above);
    const bool is_first = is_first_there(s, w->task);
    wait_for(s, w, done(s, w, OF_TASK_INPUT_GRADIENT, layer + 1, batch), bytes * share, is_first);
    if (above->split)
        wait_for(s, w, done(s, w, OF_TASK_SECOND_INPUT_GRADIENT, layer + 1, batch),
                 bytes * (1 - share), is_first);
}

/* The bytes that come with F: the layer's input for dW, its weights for dX, dY of the last
 * layer. */
static double bytes_with_forward(const simulation *s, const of_pipeline_task *task) {
    const of_pipeline_layer *l = &s->p->layers[task->layer];
    const double share = of_first_share(l, &s->p->places[task->layer]);
    const double output = (size_t)task->layer + 1 == s->p->n ? (double)l->out_bytes : 0;
    if (task->kind == OF_TASK_WEIGHT_GRADIENT)
        return output + (double)l->in_bytes;
    const bool is_second = task->kind == OF_TASK_SECOND_INPUT_GRADIENT;
    return output + (double)l->weight_bytes * (is_second ? 1 - share : share);
}

/* The all-reduce of replicas: a ring, whose 2 (r - 1) messages have an r-th of the bytes each. */
static void all_reduce(const simulation *s, wait *w, size_t layer) {
    const double r = s->p->places[layer].replicas, steps = 2 * (r - 1);
    const double bytes = steps / r * (double)s->p->layers[layer].weight_bytes;
    w->until += steps * s->link->latency + bytes * s->link->seconds_per_byte;
    w->messages += steps;
    w->bytes += bytes;
}

static void wait_for_group(const simulation *s, wait *w, size_t layer, size_t batch) {
    const size_t group = of_pipeline_group(s->p, layer), first = batch / group * group;
    const bool is_replicated = s->p->places[layer].replicas > 1;
    for (size_t b = first; b < first + group && b < s->batches; b++) {
        const of_pipeline_task *needed = done(s, w, OF_TASK_WEIGHT_GRADIENT, layer, b);
        if (!is_replicated)
            wait_for(s, w, needed, (double)s->p->layers[layer].weight_bytes, true);
        else if (needed)
            w->until = of_later(w->until, needed->end);
    }
    if (is_replicated)
        all_reduce(s, w, layer);
}

static wait wait_of(const simulation *s, const of_pipeline_task *task) {
    wait w = {.task = task, .until = s->free_at[task->process]};
    const size_t layer = (size_t)task->layer, batch = (size_t)task->batch;
    if (task->kind == OF_TASK_UPDATE) {
        wait_for_group(s, &w, layer, batch);
    } else if (task->kind != OF_TASK_FORWARD) {
        wait_for(s, &w, done(s, &w, OF_TASK_FORWARD, layer, batch), bytes_with_forward(s, task),
                 true);
        if (layer + 1 < s->p->n)
            wait_for_output_gradient(s, &w, layer, batch);
    } else if (layer) {
        wait_for(s, &w, done(s, &w, OF_TASK_FORWARD, layer - 1, batch),
                 (double)s->p->layers[layer - 1].out_bytes, true);
    }
    return w;
}

/* False: it has to wait for something that has not run yet. */
static bool run(simulation *s, of_pipeline_task *task) {
    const wait w = wait_of(s, task);
    if (w.never)
        return false;
    const size_t layer = (size_t)task->layer;
    task->start = w.until;
    task->end = w.until + of_task_seconds(&s->p->layers[layer], &s->p->places[layer], task->kind);
    s->free_at[task->process] = task->end;
    s->messages += w.messages;
    s->bytes += w.bytes;
    return true;
}

/* In turn, each process as far as it gets. */
static void run_all(simulation *s) {
    for (bool progress = true; progress;) {
        progress = false;
        for (size_t q = 0; q < s->p->processes; q++)
            for (; s->next[q] < s->ends[q] && run(s, &s->tasks[s->queue[s->next[q]]]); s->next[q]++)
                progress = true;
    }
}

static const char *const names[] = {"forward", "input gradient", "second input gradient",
                                    "weight gradient", "update"};

static of_status check_all_ran(const simulation *s) {
    for (size_t q = 0; q < s->p->processes; q++)
        if (s->next[q] < s->ends[q]) {
            const of_pipeline_task *task = &s->tasks[s->queue[s->next[q]]];
            return of_fail(OF_INVALID,
                           "process %d of a pipeline waits forever before the %s of layer %d, "
                           "batch %d: what that needs is missing or comes later",
                           task->process, names[task->kind], task->layer, task->batch);
        }
    return OF_OK;
}

/* When the task of this kind, layer and batch ends; below 0: there is none. */
static double end_of(const simulation *s, int kind, size_t layer, size_t batch) {
    const size_t found = *index_of(s, kind, layer, batch);
    return found == NO_TASK ? -1 : s->tasks[found].end;
}

/* The most seconds a batch that a task of this layer took from the first third of its groups to
 * the second; below 0: it has too few groups. */
static double period_of_layer(const simulation *s, size_t layer) {
    const size_t group = of_pipeline_group(s->p, layer), groups = s->batches / group / 3;
    if (!groups)
        return -1;
    const size_t from = groups * group - 1, to = 2 * groups * group - 1;
    double longest = 0;
    for (int kind = 0; kind < OF_TASK_KINDS; kind++) {
        const double first = end_of(s, kind, layer, from), last = end_of(s, kind, layer, to);
        if (first >= 0 && last >= 0)
            longest = of_later(longest, (last - first) / (double)(to - from));
    }
    return longest;
}

static double period_of(const simulation *s) {
    double longest = 0;
    for (size_t i = 0; i < s->p->n; i++) {
        const double period = period_of_layer(s, i);
        if (period < 0)
            return 0;
        longest = of_later(longest, period);
    }
    return longest;
}

static of_pipeline_report report_of(const simulation *s) {
    of_pipeline_report report = {.period = period_of(s)};
    double busy = 0;
    for (size_t k = 0; k < s->n; k++) {
        busy += s->tasks[k].end - s->tasks[k].start;
        report.makespan = of_later(report.makespan, s->tasks[k].end);
    }
    if (report.makespan > 0)
        report.busy = busy / report.makespan / (double)s->p->processes;
    report.messages = s->messages / (double)s->batches;
    report.bytes = s->bytes / (double)s->batches;
    return report;
}

static bool is_known(const simulation *s, const of_pipeline_task *task) {
    return task->kind >= 0 && task->kind < OF_TASK_KINDS && task->layer >= 0 &&
           (size_t)task->layer < s->p->n && task->batch >= 0 && (size_t)task->batch < s->batches &&
           of_has_task(s->p, s->first_trained, task->kind, (size_t)task->layer) &&
           task->process ==
               of_process_of(&s->p->places[task->layer], task->kind, (size_t)task->batch);
}

static of_status enter_tasks(simulation *s) {
    for (size_t k = 0; k < s->n; k++) {
        of_pipeline_task *task = &s->tasks[k];
        size_t *index = is_known(s, task)
                            ? index_of(s, task->kind, (size_t)task->layer, (size_t)task->batch)
                            : NULL;
        if (!index || *index != NO_TASK)
            return of_fail(OF_INVALID,
                           "task %zu of a schedule (kind %d, layer %d, batch %d, process %d) is "
                           "unknown, misplaced or doubled",
                           k, task->kind, task->layer, task->batch, task->process);
        *index = k;
    }
    return OF_OK;
}

/* By processes: a counting sort, which keeps the order. */
static void fill_queue(simulation *s) {
    for (size_t k = 0; k < s->n; k++)
        s->ends[s->tasks[k].process]++;
    for (size_t q = 1; q < s->p->processes; q++)
        s->ends[q] += s->ends[q - 1];
    for (size_t k = s->n; k-- > 0;)
        s->queue[--s->ends[s->tasks[k].process]] = k;
    for (size_t q = 0; q < s->p->processes; q++) {
        s->next[q] = s->ends[q];
        s->ends[q] = q + 1 < s->p->processes ? s->ends[q + 1] : s->n;
    }
}

static of_status prepare(simulation *s) {
    const size_t slots = s->batches * s->p->n * OF_TASK_KINDS;
    s->index = malloc(slots * sizeof *s->index);
    s->queue = calloc(s->n + 1, sizeof *s->queue);
    s->next = calloc(s->p->processes, sizeof *s->next);
    s->ends = calloc(s->p->processes, sizeof *s->ends);
    s->free_at = calloc(s->p->processes, sizeof *s->free_at);
    if (!s->index || !s->queue || !s->next || !s->ends || !s->free_at)
        return of_fail(OF_NO_MEMORY, "out of memory for a simulation of %zu tasks", s->n);
    for (size_t i = 0; i < slots; i++)
        s->index[i] = NO_TASK;
    return enter_tasks(s);
}

static of_status simulate(simulation *s) {
    const of_status status = prepare(s);
    if (status != OF_OK)
        return status;
    fill_queue(s);
    run_all(s);
    return check_all_ran(s);
}

static void release(simulation *s) {
    free(s->tasks);
    free(s->index);
    free(s->queue);
    free(s->next);
    free(s->ends);
    free(s->free_at);
}

static of_status check(const of_pipeline *p, const of_network_link *link, size_t batches,
                       const void *tasks, const void *report) {
    of_status status = of_pipeline_check(p);
    if (status == OF_OK)
        status = of_check_network_link(link);
    if (status == OF_OK)
        status = of_check_batches(p, batches);
    if (status == OF_OK && (!tasks || !report))
        status = of_fail(OF_INVALID, "a simulation needs tasks and a report");
    return status;
}

of_status of_pipeline_simulate(const of_pipeline *p, const of_network_link *link, size_t batches,
                               of_pipeline_task *tasks, size_t n_tasks,
                               of_pipeline_report *report) {
    of_status status = check(p, link, batches, tasks, report);
    if (status != OF_OK)
        return status;
    simulation s = {.p = p,
                    .link = link,
                    .first_trained = of_first_trained(p),
                    .batches = batches,
                    .tasks = calloc(n_tasks + 1, sizeof *tasks),
                    .n = n_tasks};
    for (size_t k = 0; s.tasks && k < n_tasks; k++) {
        s.tasks[k] = tasks[k];
        s.tasks[k].start = s.tasks[k].end = -1;
    }
    status = s.tasks
                 ? simulate(&s)
                 : of_fail(OF_NO_MEMORY, "out of memory for a simulation of %zu tasks", n_tasks);
    if (status == OF_OK) {
        memcpy(tasks, s.tasks, n_tasks * sizeof *tasks);
        *report = report_of(&s);
    }
    release(&s);
    return status;
}
