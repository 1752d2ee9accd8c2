/* SPDX-License-Identifier: BSD-3-Clause */
/* held.c: the batches that a process has begun and not ended, and the bytes that it holds for
 * them: the input of a layer from its F to its last gradient, the gradient of its output from its
 * first gradient to its last. */
#include "planners/pipeline/held.h"

#include <stdlib.h>

#include "fail.h"

/* At a time, so much more is held. */
typedef struct change {
    double at, bytes;
    int32_t process, batches;
} change;

typedef struct changes {
    change *all;
    size_t n;
} changes;

/* The first start and the last end of some tasks of one batch. */
typedef struct period {
    double from, to;
} period;

static void widen(period *of, const of_pipeline_task *task) {
    of->from = of->from < 0 || task->start < of->from ? task->start : of->from;
    of->to = of_later(of->to, task->end);
}

static void hold(changes *c, period during, int32_t process, double bytes, int32_t batches) {
    if (during.from < 0)
        return;
    c->all[c->n++] =
        (change){.at = during.from, .bytes = bytes, .process = process, .batches = batches};
    c->all[c->n++] =
        (change){.at = during.to, .bytes = -bytes, .process = process, .batches = -batches};
}

static const of_pipeline_task *find(const of_events *e, int kind, size_t layer, size_t batch) {
    const size_t found = *of_index_of(e, kind, layer, batch);
    return found == OF_NO_TASK ? NULL : &e->tasks[found];
}

static void hold_layer(const of_events *e, changes *c, size_t layer, size_t batch) {
    const of_pipeline_task *forward = find(e, OF_TASK_FORWARD, layer, batch);
    if (!forward)
        return;
    period input = {forward->start, forward->end}, output = {-1, -1};
    for (int kind = OF_TASK_INPUT_GRADIENT; kind < OF_TASK_UPDATE; kind++) {
        const of_pipeline_task *task = find(e, kind, layer, batch);
        if (!task)
            continue;
        widen(&input, task);
        widen(&output, task);
    }
    hold(c, input, forward->process, (double)e->p->layers[layer].in_bytes, 0);
    hold(c, output, forward->process, (double)e->p->layers[layer].out_bytes, 0);
}

/* By processes and times; what ends at a time before what begins then. */
static int by_time(const void *left, const void *right) {
    const change *a = left, *b = right;
    if (a->process != b->process)
        return a->process < b->process ? -1 : 1;
    if (a->at < b->at || a->at > b->at)
        return a->at < b->at ? -1 : 1;
    if (a->batches != b->batches)
        return a->batches < b->batches ? -1 : 1;
    return (a->bytes > b->bytes) - (a->bytes < b->bytes);
}

static void sum_up(const changes *c, of_pipeline_report *report) {
    double bytes = 0;
    int32_t batches = 0;
    for (size_t k = 0; k < c->n; k++) {
        bytes += c->all[k].bytes;
        batches += c->all[k].batches;
        report->held_bytes = of_later(report->held_bytes, bytes);
        if ((size_t)batches > report->in_flight && batches > 0)
            report->in_flight = (size_t)batches;
    }
}

/* open: of each process and batch. */
static void find_held(const of_events *e, size_t n, changes *c, period *open,
                      of_pipeline_report *report) {
    for (size_t k = 0; k < e->p->processes * e->batches; k++)
        open[k] = (period){-1, -1};
    for (size_t k = 0; k < n; k++)
        if (e->tasks[k].kind != OF_TASK_UPDATE)
            widen(&open[(size_t)e->tasks[k].process * e->batches + (size_t)e->tasks[k].batch],
                  &e->tasks[k]);
    for (size_t b = 0; b < e->batches; b++)
        for (size_t i = 0; i < e->p->n; i++)
            hold_layer(e, c, i, b);
    for (size_t q = 0; q < e->p->processes; q++)
        for (size_t b = 0; b < e->batches; b++)
            hold(c, open[q * e->batches + b], (int32_t)q, 0, 1);
    qsort(c->all, c->n, sizeof *c->all, by_time);
    sum_up(c, report);
}

of_status of_find_held(const of_events *e, size_t n, of_pipeline_report *report) {
    const size_t changes_a_batch = 2 * (2 * e->p->n + e->p->processes);
    changes c = {.all = calloc(e->batches, changes_a_batch * sizeof *c.all)};
    period *open = calloc(e->batches, e->p->processes * sizeof *open);
    const bool room = c.all && open;
    if (room)
        find_held(e, n, &c, open, report);
    free(c.all);
    free(open);
    return room ? OF_OK : of_fail(OF_NO_MEMORY, "out of memory for what %zu tasks hold", n);
}
