/* SPDX-License-Identifier: BSD-3-Clause */
/* placement.c: which process has which tasks of which layer. */
#include <stdlib.h>
#include <string.h>

#include "fail.h"
#include "planners/pipeline/cut.h"
#include "planners/pipeline/tasks.h"

/* The number of limits tried between the mean load and that of stages. The first that holds is
 * taken: filling is not monotone in the limit, so that it can't be bisected. */
enum { LIMITS = 400 };

/* The kinds of tasks of a layer that are still to be placed, as bits. */
enum { FORWARD = 1, WEIGHT = 2, INPUT = 4 };

static double seconds_of(const of_pipeline *p, size_t first_trained, size_t layer, int kind) {
    const of_pipeline_layer *l = &p->layers[layer];
    switch (kind) {
    case FORWARD:
        return l->forward + (l->weight_bytes ? l->update : 0);
    case WEIGHT:
        return l->weight_bytes ? l->weight_gradient : 0;
    default:
        return layer > first_trained ? l->input_gradient : 0;
    }
}

/* Stages of whole layers. */

typedef struct stage_costs {
    const of_pipeline *p;
    const of_network_link *link;
    double *seconds; /* of the first i layers */
    double *bytes;   /* of weights of the first i layers */
    size_t *trained; /* of the first i layers, how many have weights */
} stage_costs;

/* With the ring all-reduce of each layer's weights, once for r batches. */
static double load_of_stage(const void *of, size_t from, size_t to, size_t r) {
    const stage_costs *c = of;
    const double steps = 2 * ((double)r - 1);
    const double messages = steps * (double)(c->trained[to] - c->trained[from]);
    const double bytes = steps / (double)r * (c->bytes[to] - c->bytes[from]);
    const double reduced = messages * c->link->latency + bytes * c->link->seconds_per_byte;
    return (c->seconds[to] - c->seconds[from] + reduced) / (double)r;
}

static void sum_up(stage_costs *c) {
    const size_t first_trained = of_first_trained(c->p);
    for (size_t i = 0; i < c->p->n; i++) {
        c->seconds[i + 1] = c->seconds[i];
        for (int kind = FORWARD; kind <= INPUT; kind *= 2)
            c->seconds[i + 1] += seconds_of(c->p, first_trained, i, kind);
        c->bytes[i + 1] = c->bytes[i] + (double)c->p->layers[i].weight_bytes;
        c->trained[i + 1] = c->trained[i] + (c->p->layers[i].weight_bytes > 0);
    }
}

static of_pipeline_place whole_on(size_t process, size_t replicas) {
    const int32_t on = (int32_t)process;
    return (of_pipeline_place){.forward = on,
                               .weight_gradient = on,
                               .input_gradient = on,
                               .second_input_gradient = OF_NO_PROCESS,
                               .replicas = (int32_t)replicas};
}

static of_status deal(const stage_costs *c, of_pipeline_place *places, double *largest) {
    const of_pipeline *p = c->p;
    double *loads = calloc(p->processes, sizeof *loads);
    if (!loads)
        return of_fail(OF_NO_MEMORY, "out of memory for the loads of %zu processes", p->processes);
    for (size_t i = 0; i < p->n; i++) {
        const size_t on = i / p->chunk % p->processes;
        places[i] = whole_on(on, 1);
        loads[on] += c->seconds[i + 1] - c->seconds[i];
        *largest = of_later(*largest, loads[on]);
    }
    free(loads);
    return OF_OK;
}

static of_status place_stages(const stage_costs *c, of_pipeline_place *places, double *largest) {
    const of_pipeline *p = c->p;
    const bool is_replicated = p->strategy == OF_PIPELINE_REPLICATED;
    const of_stage_loads loads = {.load = load_of_stage,
                                  .of = c,
                                  .n = p->n,
                                  .most_replicas = is_replicated ? p->processes : 1};
    of_stage *stages = calloc(p->processes, sizeof *stages);
    size_t n_stages = 0;
    const of_status status =
        stages ? of_cut_stages(&loads, p->processes, stages, &n_stages, largest)
               : of_fail(OF_NO_MEMORY, "out of memory for %zu stages", p->processes);
    for (size_t s = 0; s < n_stages; s++)
        for (size_t i = stages[s].from; i < stages[s].to; i++)
            places[i] = whole_on(stages[s].process, stages[s].replicas);
    free(stages);
    return status;
}

/* Tasks of layers. */

typedef struct filling {
    const of_pipeline *p;
    size_t first_trained;
    double limit;
    bool splits;
    of_pipeline_place *places;
    size_t process; /* that is being filled */
    double load;    /* of it */
    double largest; /* of all so far */
} filling;

/* The process's portion of a layer: whole kinds, and so many channels of dX. */
typedef struct portion {
    int kinds;
    uint32_t split;
    double seconds;
} portion;

/* The channels of a first part of dX that fit into so many seconds. */
static uint32_t channels_within(const filling *f, size_t layer, double seconds) {
    const of_pipeline_layer *l = &f->p->layers[layer];
    const double whole = seconds_of(f->p, f->first_trained, layer, INPUT);
    const uint32_t most = l->channels ? (l->channels - 1) / OF_SPLIT_MULTIPLE : 0;
    if (seconds >= whole)
        return most * OF_SPLIT_MULTIPLE;
    const double fit = seconds / whole * l->channels / OF_SPLIT_MULTIPLE;
    return fit < most ? (uint32_t)fit * OF_SPLIT_MULTIPLE : most * OF_SPLIT_MULTIPLE;
}

/* The seconds of dX, or of the rest that a first part has left of it. */
static double input_seconds_left(const filling *f, size_t layer) {
    const double whole = seconds_of(f->p, f->first_trained, layer, INPUT);
    return whole * (f->places[layer].split
                        ? 1 - of_first_share(&f->p->layers[layer], &f->places[layer])
                        : 1);
}

static portion with_kinds(const filling *f, size_t layer, int kinds) {
    portion found = {.kinds = kinds};
    if (kinds & FORWARD)
        found.seconds += seconds_of(f->p, f->first_trained, layer, FORWARD);
    if (kinds & WEIGHT)
        found.seconds += seconds_of(f->p, f->first_trained, layer, WEIGHT);
    if (kinds & INPUT)
        found.seconds += input_seconds_left(f, layer);
    return found;
}

static void add_split(const filling *f, size_t layer, double room, portion *to) {
    to->split = channels_within(f, layer, room - to->seconds);
    to->seconds +=
        seconds_of(f->p, f->first_trained, layer, INPUT) * to->split / f->p->layers[layer].channels;
}

/* The one that fills the process best; of equals the one with more kinds. */
static portion best_portion(const filling *f, size_t layer, int left) {
    const double room = f->limit * (1 + 1e-12) - f->load;
    portion best = {.seconds = -1};
    for (int kinds = 0; kinds <= left; kinds++) {
        if ((kinds & left) != kinds || (kinds != left && !f->p->layers[layer].movable))
            continue;
        portion found = with_kinds(f, layer, kinds);
        if (found.seconds > room)
            continue;
        const bool is_whole = f->splits && left & ~kinds & INPUT && !f->places[layer].split;
        if (is_whole && layer > f->first_trained)
            add_split(f, layer, room, &found);
        if (found.seconds >= best.seconds)
            best = found;
    }
    return best;
}

static void put(filling *f, size_t layer, const portion *taken) {
    of_pipeline_place *place = &f->places[layer];
    const int32_t process = (int32_t)f->process;
    if (taken->kinds & FORWARD)
        place->forward = process;
    if (taken->kinds & WEIGHT)
        place->weight_gradient = process;
    if (taken->kinds & INPUT && place->split)
        place->second_input_gradient = process;
    else if (taken->kinds & INPUT || taken->split)
        place->input_gradient = process;
    if (taken->split)
        place->split = taken->split;
    f->load += taken->seconds;
    f->largest = of_later(f->largest, f->load);
}

/* Layers without dW or dX have theirs where their forward is. */
static void settle_absent(filling *f, size_t layer) {
    of_pipeline_place *place = &f->places[layer];
    if (!f->p->layers[layer].weight_bytes)
        place->weight_gradient = place->forward;
    if (layer <= f->first_trained)
        place->input_gradient = place->forward;
}

/* False: the processes are full. */
static bool fill_layer(filling *f, size_t layer) {
    int left = FORWARD | WEIGHT | INPUT;
    f->places[layer] = whole_on(0, 1);
    while (f->process < f->p->processes) {
        const portion taken = best_portion(f, layer, left);
        if (taken.kinds || taken.split) {
            put(f, layer, &taken);
            left &= ~taken.kinds;
        }
        if (!left) {
            settle_absent(f, layer);
            return true;
        }
        f->process++;
        f->load = 0;
    }
    return false;
}

static bool fill(filling *f, double limit) {
    f->limit = limit;
    f->process = 0;
    f->load = f->largest = 0;
    for (size_t i = 0; i < f->p->n; i++)
        if (!fill_layer(f, i))
            return false;
    return true;
}

/* Leaves places alone unless a filling is better than they are. */
static void improve(filling *f, double mean, of_pipeline_place *places, double *largest) {
    const double from = *largest;
    for (int step = 0; step <= LIMITS; step++)
        if (fill(f, mean + (from - mean) * step / LIMITS)) {
            if (f->largest < *largest * (1 - 1e-9)) {
                *largest = f->largest;
                memcpy(places, f->places, f->p->n * sizeof *places);
            }
            return;
        }
}

static of_status place_tasks(const stage_costs *c, of_pipeline_place *places, double *largest) {
    const of_pipeline *p = c->p;
    filling f = {.p = p, .first_trained = of_first_trained(p)};
    const double mean = c->seconds[p->n] / (double)p->processes;
    f.places = calloc(p->n, sizeof *f.places);
    if (!f.places)
        return of_fail(OF_NO_MEMORY, "out of memory for the places of %zu layers", p->n);
    const bool may_split = p->strategy == OF_PIPELINE_LAYERPIPE;
    for (int splits = 0; splits <= may_split; splits++) { /* whole dX may be better balanced */
        f.splits = splits;
        improve(&f, mean, places, largest);
    }
    free(f.places);
    return OF_OK;
}

static of_status place(stage_costs *c, of_pipeline_place *places, double *largest) {
    sum_up(c);
    if (!of_is_time(c->seconds[c->p->n]))
        return of_fail(OF_INVALID, "the seconds of %zu layers are out of range: check them",
                       c->p->n);
    if (c->p->strategy == OF_PIPELINE_MODULO)
        return deal(c, places, largest);
    const of_status status = place_stages(c, places, largest);
    if (status != OF_OK || of_places_whole_layers(c->p->strategy))
        return status;
    return place_tasks(c, places, largest);
}

of_status of_pipeline_place_layers(const of_pipeline *p, const of_network_link *link,
                                   of_pipeline_place *places, double *largest) {
    of_status status = of_check_pipeline_layers(p);
    if (status == OF_OK)
        status = of_check_network_link(link);
    if (status != OF_OK)
        return status;
    if (!places)
        return of_fail(OF_INVALID, "a placement of %zu layers needs an output", p->n);
    stage_costs c = {.p = p, .link = link};
    double load = 0;
    of_pipeline_place *found = calloc(p->n, sizeof *found);
    c.seconds = calloc(p->n + 1, sizeof *c.seconds);
    c.bytes = calloc(p->n + 1, sizeof *c.bytes);
    c.trained = calloc(p->n + 1, sizeof *c.trained);
    const bool room = found && c.seconds && c.bytes && c.trained;
    status = room ? place(&c, found, &load)
                  : of_fail(OF_NO_MEMORY, "out of memory for a placement of %zu layers", p->n);
    if (status == OF_OK)
        memcpy(places, found, p->n * sizeof *places);
    if (status == OF_OK && largest)
        *largest = load;
    free(found);
    free(c.seconds);
    free(c.bytes);
    free(c.trained);
    return status;
}
