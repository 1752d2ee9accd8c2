/* SPDX-License-Identifier: BSD-3-Clause */
/* events.c: what a task waits for: tasks that have run, and messages between processes. */
#include "planners/pipeline/events.h"

#include <stdlib.h>

#include "fail.h"

of_status of_events_begin(of_events *e, const of_pipeline *p, const of_network_link *link,
                          size_t batches, of_pipeline_task *tasks) {
    const size_t places = of_most_updated_batches(p, batches) * p->n * OF_TASK_KINDS;
    *e = (of_events){.p = p,
                     .link = link,
                     .first_trained = of_first_trained(p),
                     .batches = batches,
                     .tasks = tasks,
                     .index = malloc(places * sizeof *e->index),
                     .free_at = calloc(p->processes, sizeof *e->free_at)};
    if (!e->index || !e->free_at)
        return of_fail(OF_NO_MEMORY, "out of memory for a simulation of %zu batches", batches);
    for (size_t i = 0; i < places; i++)
        e->index[i] = OF_NO_TASK;
    return OF_OK;
}

void of_events_release(of_events *e) {
    free(e->index);
    free(e->free_at);
}

size_t *of_index_of(const of_events *e, int kind, size_t layer, size_t batch) {
    return &e->index[(batch * e->p->n + layer) * OF_TASK_KINDS + (size_t)kind];
}

/* The task that is needed; NULL: it has not run yet, and the task has to wait. */
static const of_pipeline_task *done(const of_events *e, of_wait *w, int kind, size_t layer,
                                    size_t batch) {
    const size_t found = *of_index_of(e, kind, layer, batch);
    if (found != OF_NO_TASK && e->tasks[found].end >= 0)
        return &e->tasks[found];
    w->never = true;
    return NULL;
}

/* is_first: no task before this one has had the message sent to its process. */
static void wait_for(const of_events *e, of_wait *w, const of_pipeline_task *needed, double bytes,
                     bool is_first) {
    if (!needed)
        return;
    double there = needed->end;
    if (needed->process != w->task->process) {
        there += e->link->latency + bytes * e->link->seconds_per_byte;
        w->messages += is_first;
        w->bytes += is_first ? bytes : 0;
    }
    w->until = of_later(w->until, there);
}

/* Whether no gradient of the layer that comes before this kind is on the same process. */
static bool is_first_there(const of_events *e, const of_pipeline_task *task) {
    const of_pipeline_place *place = &e->p->places[task->layer];
    for (int kind = OF_TASK_INPUT_GRADIENT; kind < task->kind; kind++)
        if (of_has_task(e->p, e->first_trained, kind, (size_t)task->layer) &&
            of_process_of(place, kind, (size_t)task->batch) == task->process)
            return false;
    return true;
}

static void wait_for_output_gradient(const of_events *e, of_wait *w, size_t layer, size_t batch) {
    const double bytes = (double)e->p->layers[layer].out_bytes;
    const of_pipeline_place *above = &e->p->places[layer + 1];
    const double share = of_first_share(&e->p->layers[layer + 1], above);
    const bool is_first = is_first_there(e, w->task);
    wait_for(e, w, done(e, w, OF_TASK_INPUT_GRADIENT, layer + 1, batch), bytes * share, is_first);
    if (above->split)
        wait_for(e, w, done(e, w, OF_TASK_SECOND_INPUT_GRADIENT, layer + 1, batch),
                 bytes * (1 - share), is_first);
}

/* The bytes that come with F: the layer's input for dW, its weights for dX, dY of the last
 * layer. */
static double bytes_with_forward(const of_events *e, const of_pipeline_task *task) {
    const of_pipeline_layer *l = &e->p->layers[task->layer];
    const double share = of_first_share(l, &e->p->places[task->layer]);
    const double output = (size_t)task->layer + 1 == e->p->n ? (double)l->out_bytes : 0;
    if (task->kind == OF_TASK_WEIGHT_GRADIENT)
        return output + (double)l->in_bytes;
    const bool is_second = task->kind == OF_TASK_SECOND_INPUT_GRADIENT;
    return output + (double)l->weight_bytes * (is_second ? 1 - share : share);
}

/* The all-reduce of replicas: a ring, whose 2 (r - 1) messages have an r-th of the bytes each. */
static void all_reduce(const of_events *e, of_wait *w, size_t layer) {
    const double r = e->p->places[layer].replicas, steps = 2 * (r - 1);
    const double bytes = steps / r * (double)e->p->layers[layer].weight_bytes;
    w->until += steps * e->link->latency + bytes * e->link->seconds_per_byte;
    w->messages += steps;
    w->bytes += bytes;
}

static void wait_for_group(const of_events *e, of_wait *w, size_t layer, size_t batch) {
    const size_t group = of_pipeline_group(e->p, layer), first = batch / group * group;
    const bool is_replicated = e->p->places[layer].replicas > 1;
    for (size_t b = first; b < first + group && b < e->batches; b++) {
        const of_pipeline_task *needed = done(e, w, OF_TASK_WEIGHT_GRADIENT, layer, b);
        if (!is_replicated)
            wait_for(e, w, needed, (double)e->p->layers[layer].weight_bytes, true);
        else if (needed)
            w->until = of_later(w->until, needed->end);
    }
    if (is_replicated)
        all_reduce(e, w, layer);
}

of_wait of_wait_of(const of_events *e, const of_pipeline_task *task) {
    of_wait w = {.task = task, .until = e->free_at[task->process]};
    const size_t layer = (size_t)task->layer, batch = (size_t)task->batch;
    if (task->kind == OF_TASK_UPDATE) {
        wait_for_group(e, &w, layer, batch);
    } else if (task->kind != OF_TASK_FORWARD) {
        wait_for(e, &w, done(e, &w, OF_TASK_FORWARD, layer, batch), bytes_with_forward(e, task),
                 true);
        if (layer + 1 < e->p->n)
            wait_for_output_gradient(e, &w, layer, batch);
    } else if (layer) {
        wait_for(e, &w, done(e, &w, OF_TASK_FORWARD, layer - 1, batch),
                 (double)e->p->layers[layer - 1].out_bytes, true);
    }
    return w;
}

void of_run(of_events *e, of_pipeline_task *task, const of_wait *w) {
    const size_t layer = (size_t)task->layer;
    task->start = w->until;
    task->end = w->until + of_task_seconds(&e->p->layers[layer], &e->p->places[layer], task->kind);
    e->free_at[task->process] = task->end;
    e->messages += w->messages;
    e->bytes += w->bytes;
}
