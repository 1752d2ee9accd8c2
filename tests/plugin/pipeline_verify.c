/* SPDX-License-Identifier: BSD-3-Clause */
/* pipeline_verify.c: see pipeline_verify.h. From the tasks' times alone, by rules of its own of what a
 * task needs: were they those of the simulator, its mistakes would be right. */
#include "pipeline_verify.h"

#include <stdlib.h>

#include "planners/pipeline/tasks.h"

typedef struct verification {
    const of_pipeline *p;
    const of_network_link *link;
    const uint32_t *delays;
    size_t first_trained;
    size_t batches;
    const of_pipeline_task *tasks;
    const of_pipeline_task **found; /* by batch, layer and kind; NULL: missing */
    double *ended;                  /* of each process, its task before */
    size_t *open;                   /* of each process, batches begun and not ended */
    uint32_t *left;                 /* of each process and batch, gradients to come once begun */
    size_t violations;
} verification;

static const of_pipeline_task **place_of(const verification *v, int kind, size_t layer,
                                         size_t batch) {
    return &v->found[(batch * v->p->n + layer) * OF_TASK_KINDS + (size_t)kind];
}

static const of_pipeline_task *find(const verification *v, int kind, size_t layer, size_t batch) {
    return *place_of(v, kind, layer, batch);
}

/* Written so that a NaN is wrong. */
static void require(verification *v, bool holds) {
    v->violations += !holds;
}

static bool is_at_least(double seconds, double least) {
    return seconds >= least - 1e-9 * least;
}

/* Tasks by themselves. */

/* A batch of the run. All replicas make the update of a group that has begun, each in the name of
 * its own batch, also where that one has not come. */
static bool is_named(const verification *v, int kind, size_t layer, size_t batch) {
    const bool one_each = kind == OF_TASK_UPDATE && v->p->places[layer].replicas > 1;
    return (one_each ? batch - batch % of_pipeline_group(v->p, layer) : batch) < v->batches;
}

static bool is_one_of(const verification *v, const of_pipeline_task *task) {
    if (task->kind < 0 || task->kind >= OF_TASK_KINDS || task->layer < 0 || task->batch < 0 ||
        (size_t)task->layer >= v->p->n ||
        !is_named(v, task->kind, (size_t)task->layer, (size_t)task->batch))
        return false;
    return of_has_task(v->p, v->first_trained, task->kind, (size_t)task->layer);
}

static bool takes_its_time(const verification *v, const of_pipeline_task *task) {
    const double seconds =
        of_task_seconds(&v->p->layers[task->layer], &v->p->places[task->layer], task->kind);
    return of_is_time(task->start) && of_is_time(task->end) &&
           is_at_least(task->end, task->start + seconds) &&
           is_at_least(task->start + seconds, task->end);
}

static bool is_in_place(const verification *v, const of_pipeline_task *task) {
    return task->process ==
           of_process_of(&v->p->places[task->layer], task->kind, (size_t)task->batch);
}

/* The time a process spends on communication before an update of replicas. */
static double all_reduce_seconds(const verification *v, size_t layer) {
    const double r = v->p->places[layer].replicas;
    const double part = (double)v->p->layers[layer].weight_bytes / r;
    return 2 * (r - 1) * (v->link->latency + part * v->link->seconds_per_byte);
}

/* Enters those that the rest can rely on. */
static void verify_task(verification *v, const of_pipeline_task *task) {
    const bool good = is_one_of(v, task) && is_in_place(v, task) && takes_its_time(v, task);
    require(v, good);
    if (!good)
        return;
    const of_pipeline_task **place =
        place_of(v, task->kind, (size_t)task->layer, (size_t)task->batch);
    require(v, !*place);
    *place = task;
    const bool is_reduced = task->kind == OF_TASK_UPDATE && v->p->places[task->layer].replicas > 1;
    const double reduces = is_reduced ? all_reduce_seconds(v, (size_t)task->layer) : 0;
    require(v, is_at_least(task->start, v->ended[task->process] + reduces));
    v->ended[task->process] = of_later(v->ended[task->process], task->end);
}

/* Only the last batch of a group of micro-batches has the group's update. */
static bool must_be_there(const verification *v, int kind, size_t layer, size_t batch) {
    const size_t micro = v->p->micro_batches;
    if (kind == OF_TASK_UPDATE && batch % micro != micro - 1 && batch + 1 < v->batches)
        return false;
    return is_named(v, kind, layer, batch) && of_has_task(v->p, v->first_trained, kind, layer);
}

static void verify_presence(verification *v, size_t layer, size_t batch) {
    for (int kind = 0; kind < OF_TASK_KINDS; kind++)
        require(v, must_be_there(v, kind, layer, batch) == (find(v, kind, layer, batch) != NULL));
}

/* The values that tasks need. A task that is missing has been counted. */

static void verify_after(verification *v, const of_pipeline_task *later,
                         const of_pipeline_task *earlier, double bytes) {
    if (!later || !earlier)
        return;
    const double message = v->link->latency + bytes * v->link->seconds_per_byte;
    require(v, is_at_least(later->start,
                           earlier->end + (later->process == earlier->process ? 0 : message)));
}

/* Both parts of the gradient of the layer's output, which have its bytes between them. */
static void verify_output_gradient(verification *v, const of_pipeline_task *task, size_t layer,
                                   size_t batch) {
    const uint32_t split = v->p->places[layer + 1].split;
    const double bytes = (double)v->p->layers[layer].out_bytes;
    const double first = split ? bytes * split / v->p->layers[layer + 1].channels : bytes;
    verify_after(v, task, find(v, OF_TASK_INPUT_GRADIENT, layer + 1, batch), first);
    if (split)
        verify_after(v, task, find(v, OF_TASK_SECOND_INPUT_GRADIENT, layer + 1, batch),
                     bytes - first);
}

static void verify_gradient(verification *v, int kind, double bytes, size_t layer, size_t batch) {
    const of_pipeline_task *task = find(v, kind, layer, batch);
    if (!task)
        return;
    if (layer + 1 == v->p->n)
        bytes += (double)v->p->layers[layer].out_bytes;
    else
        verify_output_gradient(v, task, layer, batch);
    verify_after(v, task, find(v, OF_TASK_FORWARD, layer, batch), bytes);
}

static void verify_passes(verification *v, size_t layer, size_t batch) {
    const of_pipeline_layer *l = &v->p->layers[layer];
    const uint32_t split = v->p->places[layer].split;
    const double weights = (double)l->weight_bytes;
    const double first = split ? weights * split / l->channels : weights;
    if (layer)
        verify_after(v, find(v, OF_TASK_FORWARD, layer, batch),
                     find(v, OF_TASK_FORWARD, layer - 1, batch),
                     (double)v->p->layers[layer - 1].out_bytes);
    verify_gradient(v, OF_TASK_INPUT_GRADIENT, first, layer, batch);
    verify_gradient(v, OF_TASK_SECOND_INPUT_GRADIENT, weights - first, layer, batch);
    verify_gradient(v, OF_TASK_WEIGHT_GRADIENT, (double)l->in_bytes, layer, batch);
}

/* Updates, and what a forward sees of them. */

/* The update of this batch's group on the process of this batch; NULL: there is none. */
static const of_pipeline_task *update_of_group(const verification *v, size_t layer, size_t group,
                                               size_t batch) {
    const size_t size = of_pipeline_group(v->p, layer), micro = v->p->micro_batches;
    size_t last = group * size + (micro > 1 ? size - 1 : batch % size);
    if (micro > 1 && last >= v->batches)
        last = v->batches - 1;
    return last < v->batches ? find(v, OF_TASK_UPDATE, layer, last) : NULL;
}

/* Both tasks are of one process, which runs them in the array's order. */
static bool is_before(const of_pipeline_task *a, const of_pipeline_task *b) {
    return a && b && a < b;
}

/* Gradients that share an update are added up in the order of their batches. */
static void verify_order(verification *v, size_t layer, size_t batch) {
    if (batch % v->p->micro_batches == 0)
        return;
    const of_pipeline_task *before = find(v, OF_TASK_WEIGHT_GRADIENT, layer, batch - 1);
    const of_pipeline_task *task = find(v, OF_TASK_WEIGHT_GRADIENT, layer, batch);
    require(v, !task || is_before(before, task));
}

static void verify_update(verification *v, size_t layer, size_t batch) {
    const of_pipeline_task *update = find(v, OF_TASK_UPDATE, layer, batch);
    if (!update)
        return;
    const size_t size = of_pipeline_group(v->p, layer), group = batch / size;
    const double bytes = (double)v->p->layers[layer].weight_bytes;
    const bool is_reduced = v->p->places[layer].replicas > 1;
    for (size_t b = group * size; b < (group + 1) * size && b < v->batches; b++) {
        const of_pipeline_task *gradient = find(v, OF_TASK_WEIGHT_GRADIENT, layer, b);
        if (is_reduced && gradient)
            require(v, is_at_least(update->start, gradient->end + all_reduce_seconds(v, layer)));
        else
            verify_after(v, update, gradient, bytes);
    }
    if (group) {
        const of_pipeline_task *before = update_of_group(v, layer, group - 1, batch);
        require(v, before && before < update && is_at_least(update->start, before->end));
    }
}

static void verify_seen(verification *v, size_t layer, size_t batch) {
    const of_pipeline_task *forward = find(v, OF_TASK_FORWARD, layer, batch);
    const size_t group = batch / of_pipeline_group(v->p, layer);
    if (!forward || !v->p->layers[layer].weight_bytes || group < v->delays[layer])
        return;
    const size_t unseen = group - v->delays[layer];
    const of_pipeline_task *first_unseen = update_of_group(v, layer, unseen, batch);
    if (unseen)
        require(v, is_before(update_of_group(v, layer, unseen - 1, batch), forward));
    if (first_unseen)
        require(v, is_before(forward, first_unseen));
}

/* Batches in flight. Of tasks that have been found to be good. */

static uint32_t gradients_on(const verification *v, int32_t process) {
    uint32_t found = 0;
    for (size_t i = 0; i < v->p->n; i++)
        for (int kind = OF_TASK_INPUT_GRADIENT; kind < OF_TASK_UPDATE; kind++)
            found +=
                v->p->places[i].forward == process && of_has_task(v->p, v->first_trained, kind, i);
    return found;
}

static void count_open(verification *v, const of_pipeline_task *task) {
    uint32_t *left = &v->left[(size_t)task->process * v->batches + (size_t)task->batch];
    if (task->kind == OF_TASK_FORWARD && !*left) {
        *left = gradients_on(v, task->process);
        v->open[task->process] += *left > 0;
        require(v, v->open[task->process] <= v->p->in_flight);
    } else if (task->kind != OF_TASK_FORWARD && task->kind != OF_TASK_UPDATE && *left) {
        v->open[task->process] -= --*left == 0;
    }
}

static void verify_in_flight(verification *v, size_t n_tasks) {
    for (size_t k = 0; v->p->in_flight && k < n_tasks; k++) {
        const of_pipeline_task *task = &v->tasks[k];
        if (is_one_of(v, task) &&
            find(v, task->kind, (size_t)task->layer, (size_t)task->batch) == task)
            count_open(v, task);
    }
}

static void verify_all(verification *v, size_t n_tasks) {
    for (size_t k = 0; k < n_tasks; k++)
        verify_task(v, &v->tasks[k]);
    for (size_t b = 0; b < of_most_updated_batches(v->p, v->batches); b++)
        for (size_t i = 0; i < v->p->n; i++) {
            verify_presence(v, i, b);
            verify_passes(v, i, b);
            verify_update(v, i, b);
            verify_order(v, i, b);
            verify_seen(v, i, b);
        }
    verify_in_flight(v, n_tasks);
}

size_t count_violations(const of_pipeline *p, const of_network_link *link, const uint32_t *delays,
                        size_t batches, const of_pipeline_task *tasks, size_t n_tasks) {
    verification v = {.p = p,
                      .link = link,
                      .delays = delays,
                      .first_trained = of_first_trained(p),
                      .batches = batches,
                      .tasks = tasks};
    v.found =
        calloc(of_most_updated_batches(p, batches) * p->n * OF_TASK_KINDS, sizeof *v.found);
    v.ended = calloc(p->processes, sizeof *v.ended);
    v.open = calloc(p->processes, sizeof *v.open);
    v.left = calloc(p->processes, batches * sizeof *v.left);
    if (!v.found || !v.ended || !v.open || !v.left)
        abort();
    verify_all(&v, n_tasks);
    free(v.found);
    free(v.ended);
    free(v.open);
    free(v.left);
    return v.violations;
}
