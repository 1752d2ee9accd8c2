/* SPDX-License-Identifier: BSD-3-Clause */
/* slots.c: the slots of a pipeline's tasks, and how late gradients are.
 *
 * Batch 0 is in slot s of a task if s processes lie before it on its longest way; batch b is in
 * slot s + b. In a slot a process has its tasks of one batch after the other's: each F, and then
 * the gradients from the last layer down, each as soon as those above it. */
#include <stdlib.h>

#include "fail.h"
#include "planners/pipeline/slots.h"

static int32_t *slot_of(int32_t *slots, size_t layer, int kind) {
    return &slots[layer * OF_TASK_KINDS + (size_t)kind];
}

/* The slot of what needs a task in slot `from`, on the same process or on another. */
static int32_t after(int32_t from, int32_t on, int32_t process) {
    return from + (on != process);
}

static void raise_to(int32_t *slot, int32_t least) {
    if (*slot < least)
        *slot = least;
}

/* A gradient waits for its layer's F and for the gradient of its output. */
static void place_gradient(const of_pipeline *p, int32_t *slots, size_t i, int kind) {
    const of_pipeline_place *place = &p->places[i], *above = &p->places[i + 1];
    const int32_t on = of_process_of(place, kind, 0);
    int32_t *slot = slot_of(slots, i, kind);
    *slot = after(*slot_of(slots, i, OF_TASK_FORWARD), place->forward, on);
    if (i + 1 == p->n)
        return;
    raise_to(slot,
             after(*slot_of(slots, i + 1, OF_TASK_INPUT_GRADIENT), above->input_gradient, on));
    if (above->split)
        raise_to(slot, after(*slot_of(slots, i + 1, OF_TASK_SECOND_INPUT_GRADIENT),
                             above->second_input_gradient, on));
}

int32_t of_find_slots(const of_pipeline *p, int32_t *slots) {
    int32_t last = 0;
    for (size_t i = 0; i < p->n; i++)
        *slot_of(slots, i, OF_TASK_FORWARD) =
            i ? after(*slot_of(slots, i - 1, OF_TASK_FORWARD), p->places[i - 1].forward,
                      p->places[i].forward)
              : 0;
    for (size_t i = p->n; i-- > 0;) {
        place_gradient(p, slots, i, OF_TASK_INPUT_GRADIENT);
        if (p->places[i].split)
            place_gradient(p, slots, i, OF_TASK_SECOND_INPUT_GRADIENT);
        place_gradient(p, slots, i, OF_TASK_WEIGHT_GRADIENT);
        *slot_of(slots, i, OF_TASK_UPDATE) =
            after(*slot_of(slots, i, OF_TASK_WEIGHT_GRADIENT), p->places[i].weight_gradient,
                  p->places[i].forward);
    }
    for (size_t i = 0; i < p->n * OF_TASK_KINDS; i++)
        raise_to(&last, slots[i]);
    return last;
}

/* How many processes are on the stage of a layer or on one after it. */
static size_t processes_from(const of_pipeline *p, size_t layer) {
    const of_pipeline_place *last = &p->places[p->n - 1];
    size_t found = (size_t)last->replicas;
    for (size_t i = p->n - 1; i-- > layer;)
        if (p->places[i].forward != p->places[i + 1].forward)
            found += (size_t)p->places[i].replicas;
    return found;
}

size_t of_processes_after(const of_pipeline *p, size_t layer) {
    return processes_from(p, layer) - (size_t)p->places[layer].replicas;
}

uint32_t of_stage_delay(const of_pipeline *p, size_t layer) {
    if (of_is_synchronous(p->strategy))
        return 0;
    const size_t replicas = (size_t)p->places[layer].replicas;
    return (uint32_t)((processes_from(p, layer) - 1) / replicas);
}

of_status of_pipeline_delays(const of_pipeline *p, uint32_t *delays) {
    if (of_pipeline_check(p) != OF_OK)
        return OF_INVALID;
    if (!delays)
        return of_fail(OF_INVALID, "the delays of %zu layers need an output", p->n);
    if (of_places_whole_layers(p->strategy)) {
        for (size_t i = 0; i < p->n; i++)
            delays[i] = of_stage_delay(p, i);
        return OF_OK;
    }
    int32_t *slots = calloc(p->n, OF_TASK_KINDS * sizeof *slots);
    if (!slots)
        return of_fail(OF_NO_MEMORY, "out of memory for the slots of %zu layers", p->n);
    of_find_slots(p, slots);
    for (size_t i = 0; i < p->n; i++)
        delays[i] =
            (uint32_t)(*slot_of(slots, i, OF_TASK_UPDATE) - *slot_of(slots, i, OF_TASK_FORWARD));
    free(slots);
    return OF_OK;
}
