/* SPDX-License-Identifier: BSD-3-Clause */
/* schedule.c: the order in which processes run their tasks. */
#include <stdlib.h>

#include "fail.h"
#include "planners/pipeline/fast_forward.h"
#include "planners/pipeline/slots.h"

typedef struct emission {
    const of_pipeline *p;
    size_t first_trained;
    size_t batches;
    of_pipeline_task *tasks;
    size_t n;
} emission;

static bool ends_group(const emission *e, size_t batch) {
    return (batch + 1) % e->p->micro_batches == 0 || batch + 1 == e->batches;
}

static void emit(emission *e, int kind, size_t layer, size_t batch) {
    if (!of_has_task(e->p, e->first_trained, kind, layer) ||
        !of_is_of_batch(e->p, kind, layer, batch, e->batches))
        return;
    if (kind == OF_TASK_UPDATE && !ends_group(e, batch))
        return;
    e->tasks[e->n++] =
        (of_pipeline_task){.kind = kind,
                           .layer = (int32_t)layer,
                           .batch = (int32_t)batch,
                           .process = of_process_of(&e->p->places[layer], kind, batch)};
}

/* Slots. */

static void emit_at(emission *e, const int32_t *slots, size_t now, int kind, size_t layer) {
    const size_t slot = (size_t)slots[layer * OF_TASK_KINDS + (size_t)kind];
    if (now >= slot)
        emit(e, kind, layer, now - slot);
}

/* F first: it must not see the updates of its slot. */
static void emit_slots(emission *e, const int32_t *slots, size_t last) {
    for (size_t now = 0; now < e->batches + last; now++) {
        for (size_t i = 0; i < e->p->n; i++)
            emit_at(e, slots, now, OF_TASK_FORWARD, i);
        for (size_t i = e->p->n; i-- > 0;)
            for (int kind = OF_TASK_INPUT_GRADIENT; kind < OF_TASK_KINDS; kind++)
                emit_at(e, slots, now, kind, i);
    }
}

static of_status schedule_slots(emission *e) {
    int32_t *slots = calloc(e->p->n, OF_TASK_KINDS * sizeof *slots);
    if (!slots)
        return of_fail(OF_NO_MEMORY, "out of memory for the slots of %zu layers", e->p->n);
    const size_t last = (size_t)of_find_slots(e->p, slots);
    emit_slots(e, slots, last + 1);
    free(slots);
    return OF_OK;
}

/* Stages of the layers [from, to). */

typedef struct span {
    size_t from, to;
} span;

static span stage_from(const of_pipeline *p, size_t from) {
    size_t to = from + 1;
    while (to < p->n && p->places[to].forward == p->places[from].forward)
        to++;
    return (span){.from = from, .to = to};
}

static void emit_forward(emission *e, span stage, size_t batch) {
    for (size_t i = stage.from; i < stage.to; i++)
        emit(e, OF_TASK_FORWARD, i, batch);
}

static void emit_backward(emission *e, span stage, size_t batch) {
    for (size_t i = stage.to; i-- > stage.from;) {
        emit(e, OF_TASK_INPUT_GRADIENT, i, batch);
        emit(e, OF_TASK_WEIGHT_GRADIENT, i, batch);
    }
    for (size_t i = stage.to; i-- > stage.from;)
        emit(e, OF_TASK_UPDATE, i, batch);
}

static void emit_gpipe(emission *e, span stage) {
    const size_t group = e->p->micro_batches;
    for (size_t first = 0; first < e->batches; first += group) {
        for (size_t b = first; b < first + group; b++)
            emit_forward(e, stage, b);
        for (size_t b = first; b < first + group && b < e->batches; b++)
            emit_backward(e, stage, b);
    }
}

/* Within each group. */
static void emit_1f1b_flush(emission *e, span stage) {
    const size_t group = e->p->micro_batches, after = of_processes_after(e->p, stage.from);
    for (size_t first = 0; first < e->batches; first += group) {
        const size_t ahead = after < group ? after : group;
        for (size_t b = first; b < first + ahead; b++)
            emit_forward(e, stage, b);
        for (size_t b = first; b < first + group && b < e->batches; b++) {
            if (b + ahead < first + group)
                emit_forward(e, stage, b + ahead);
            emit_backward(e, stage, b);
        }
    }
}

/* One of the stage's replicas, which has every r-th batch from `first` on, and the update of an
 * incomplete last group. */
static void emit_1f1b(emission *e, span stage, size_t first) {
    const size_t r = (size_t)e->p->places[stage.from].replicas;
    const size_t ahead = r * of_stage_delay(e->p, stage.from);
    for (size_t b = first; b < first + ahead; b += r)
        emit_forward(e, stage, b);
    for (size_t b = first; b < of_updated_batches(e->p, stage.from, e->batches); b += r) {
        emit_forward(e, stage, b + ahead);
        emit_backward(e, stage, b);
    }
}

static void schedule_stages(emission *e) {
    for (span stage = stage_from(e->p, 0);; stage = stage_from(e->p, stage.to)) {
        const size_t r = (size_t)e->p->places[stage.from].replicas;
        if (e->p->strategy == OF_PIPELINE_GPIPE)
            emit_gpipe(e, stage);
        else if (e->p->strategy == OF_PIPELINE_1F1B_FLUSH)
            emit_1f1b_flush(e, stage);
        else
            for (size_t replica = 0; replica < r; replica++)
                emit_1f1b(e, stage, replica);
        if (stage.to == e->p->n)
            return;
    }
}

of_status of_pipeline_schedule(const of_pipeline *p, const of_network_link *link, size_t batches,
                               of_pipeline_task *tasks) {
    of_status status = of_pipeline_check(p);
    if (status == OF_OK)
        status = of_check_network_link(link);
    if (status == OF_OK)
        status = of_check_batches(p, batches);
    if (status != OF_OK)
        return status;
    if (!tasks)
        return of_fail(OF_INVALID, "a schedule needs an array for its tasks");
    if (of_forwards_fast(p->strategy))
        return of_schedule_fast_forward(p, link, batches, tasks);
    emission e = {.p = p, .first_trained = of_first_trained(p), .batches = batches, .tasks = tasks};
    if (!of_places_whole_layers(p->strategy))
        return schedule_slots(&e);
    schedule_stages(&e);
    return OF_OK;
}
