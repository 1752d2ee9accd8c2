/* SPDX-License-Identifier: BSD-3-Clause */
/* tasks.c: the tasks of a pipeline's layers, and what a pipeline has to keep to. */
#include "planners/pipeline/tasks.h"

#include "fail.h"

static of_status check_layer(const of_pipeline_layer *l, size_t i) {
    if (!of_is_time(l->forward) || !of_is_time(l->input_gradient) ||
        !of_is_time(l->weight_gradient) || !of_is_time(l->update))
        return of_fail(OF_INVALID,
                       "layer %zu of a pipeline takes %g, %g, %g and %g s (forward, input "
                       "gradient, weight gradient, update): none may be negative or infinite",
                       i, l->forward, l->input_gradient, l->weight_gradient, l->update);
    if (l->movable && (!l->weight_bytes || !l->channels))
        return of_fail(OF_INVALID,
                       "layer %zu of a pipeline is movable without weight_bytes or channels: give "
                       "both",
                       i);
    return OF_OK;
}

/* The settings of strategies that schedule by what is ready. */
static of_status check_readiness(const of_pipeline *p) {
    if (p->in_flight && !of_forwards_fast(p->strategy))
        return of_fail(
            OF_INVALID,
            "at most %zu batches in flight: only fast-forwarding strategies keep to that",
            p->in_flight);
    if ((p->chunk > 0) != (p->strategy == OF_PIPELINE_MODULO))
        return of_fail(OF_INVALID,
                       "%zu layers a turn: give the modulo strategy at least 1, the others 0",
                       p->chunk);
    return OF_OK;
}

of_status of_check_pipeline_layers(const of_pipeline *p) {
    if (!p || !p->layers || !p->n || p->n > INT32_MAX)
        return of_fail(OF_INVALID, "a pipeline needs 1 to %d layers", INT32_MAX);
    if ((unsigned)p->strategy >= OF_PIPELINE_STRATEGIES)
        return of_fail(OF_INVALID, "there is no strategy %d of pipelines", (int)p->strategy);
    if (p->processes < 1 || p->processes > INT32_MAX)
        return of_fail(OF_INVALID, "a pipeline can't run on %zu processes: give 1 to %d",
                       p->processes, INT32_MAX);
    if (p->micro_batches < 1 || p->micro_batches > INT32_MAX ||
        (p->micro_batches > 1 && !of_is_synchronous(p->strategy)))
        return of_fail(OF_INVALID,
                       "%zu micro-batches an update: give at least 1, and more than 1 only to "
                       "strategies without delays",
                       p->micro_batches);
    if (check_readiness(p) != OF_OK)
        return OF_INVALID;
    for (size_t i = 0; i < p->n; i++)
        if (check_layer(&p->layers[i], i) != OF_OK)
            return OF_INVALID;
    return OF_OK;
}

bool of_places_whole_layers(of_strategy strategy) {
    return strategy != OF_PIPELINE_INTRA && strategy != OF_PIPELINE_LAYERPIPE;
}

bool of_forwards_fast(of_strategy strategy) {
    return strategy == OF_PIPELINE_FAST_FORWARD || strategy == OF_PIPELINE_MODULO;
}

bool of_is_synchronous(of_strategy strategy) {
    return strategy == OF_PIPELINE_GPIPE || strategy == OF_PIPELINE_1F1B_FLUSH ||
           of_forwards_fast(strategy);
}

static bool is_process(const of_pipeline *p, int32_t process) {
    return process >= 0 && (size_t)process < p->processes;
}

static bool are_processes(const of_pipeline *p, const of_pipeline_place *place) {
    return is_process(p, place->forward) && is_process(p, place->weight_gradient) &&
           is_process(p, place->input_gradient) &&
           (place->second_input_gradient == OF_NO_PROCESS ||
            is_process(p, place->second_input_gradient)) &&
           place->replicas >= 1 &&
           (size_t)place->replicas <= p->processes - (size_t)place->forward &&
           (place->replicas == 1 || p->strategy == OF_PIPELINE_REPLICATED);
}

static bool is_whole(const of_pipeline_place *place) {
    return place->weight_gradient == place->forward && place->input_gradient == place->forward &&
           place->second_input_gradient == OF_NO_PROCESS;
}

/* Whether the layer is on the stage of the one before it, or on one behind that. */
static bool goes_on(const of_pipeline_place *before, const of_pipeline_place *place) {
    const bool same = place->forward == before->forward && place->replicas == before->replicas;
    return same || place->forward >= before->forward + before->replicas;
}

static of_status check_split(const of_pipeline *p, size_t i) {
    const of_pipeline_place *place = &p->places[i];
    const bool is_split = place->second_input_gradient != OF_NO_PROCESS;
    const bool fits = place->split % OF_SPLIT_MULTIPLE == 0 && place->split > 0 &&
                      place->split < p->layers[i].channels &&
                      place->second_input_gradient != place->input_gradient;
    if (is_split ? !fits : place->split != 0)
        return of_fail(OF_INVALID,
                       "layer %zu of a pipeline has its input gradient split at %u of %u channels, "
                       "over processes %d and %d: split at a multiple of %d, over two processes",
                       i, place->split, p->layers[i].channels, place->input_gradient,
                       place->second_input_gradient, OF_SPLIT_MULTIPLE);
    return OF_OK;
}

static of_status check_place(const of_pipeline *p, size_t first_trained, size_t i) {
    const of_pipeline_place *place = &p->places[i];
    if (!are_processes(p, place))
        return of_fail(OF_INVALID,
                       "layer %zu of a pipeline is placed on a process that is none of %zu, or on "
                       "%d replicas that its strategy does not have",
                       i, p->processes, place->replicas);
    const bool whole = of_places_whole_layers(p->strategy) || !p->layers[i].movable;
    if (whole && !is_whole(place))
        return of_fail(OF_INVALID, "layer %zu of a pipeline can't be divided: place it whole", i);
    if (!of_has_task(p, first_trained, OF_TASK_INPUT_GRADIENT, i) &&
        place->input_gradient != place->forward)
        return of_fail(OF_INVALID,
                       "layer %zu of a pipeline has no input gradient: leave its process that of "
                       "the forward",
                       i);
    const bool has_stages =
        of_places_whole_layers(p->strategy) && p->strategy != OF_PIPELINE_MODULO;
    if (has_stages && i && !goes_on(&p->places[i - 1], place))
        return of_fail(OF_INVALID,
                       "layer %zu of a pipeline is on a process of an earlier stage: stages are "
                       "contiguous",
                       i);
    return check_split(p, i);
}

of_status of_pipeline_check(const of_pipeline *p) {
    if (of_check_pipeline_layers(p) != OF_OK)
        return OF_INVALID;
    if (!p->places)
        return of_fail(OF_INVALID, "a pipeline needs a place for each of its %zu layers", p->n);
    const size_t first_trained = of_first_trained(p);
    for (size_t i = 0; i < p->n; i++)
        if (check_place(p, first_trained, i) != OF_OK)
            return OF_INVALID;
    return OF_OK;
}

of_status of_check_batches(const of_pipeline *p, size_t batches) {
    const size_t most = SIZE_MAX / sizeof(of_pipeline_task) / OF_TASK_KINDS / p->n;
    if (batches < 1 || batches > most || of_most_updated_batches(p, batches) > INT32_MAX)
        return of_fail(OF_INVALID, "a schedule of %zu batches and %zu layers: give 1 to %d batches",
                       batches, p->n, INT32_MAX);
    return OF_OK;
}

size_t of_first_trained(const of_pipeline *p) {
    size_t i = 0;
    while (i < p->n && !p->layers[i].weight_bytes)
        i++;
    return i;
}

bool of_has_task(const of_pipeline *p, size_t first_trained, int kind, size_t layer) {
    switch (kind) {
    case OF_TASK_FORWARD:
        return true;
    case OF_TASK_INPUT_GRADIENT:
        return layer > first_trained;
    case OF_TASK_SECOND_INPUT_GRADIENT:
        return layer > first_trained && p->places[layer].split;
    default:
        return p->layers[layer].weight_bytes;
    }
}

int32_t of_process_of(const of_pipeline_place *place, int kind, size_t batch) {
    if (place->replicas > 1)
        return place->forward + (int32_t)(batch % (size_t)place->replicas);
    switch (kind) {
    case OF_TASK_INPUT_GRADIENT:
        return place->input_gradient;
    case OF_TASK_SECOND_INPUT_GRADIENT:
        return place->second_input_gradient;
    case OF_TASK_WEIGHT_GRADIENT:
        return place->weight_gradient;
    default:
        return place->forward;
    }
}

double of_first_share(const of_pipeline_layer *layer, const of_pipeline_place *place) {
    return place->split ? place->split / (double)layer->channels : 1;
}

double of_task_seconds(const of_pipeline_layer *layer, const of_pipeline_place *place, int kind) {
    const double share = of_first_share(layer, place);
    switch (kind) {
    case OF_TASK_FORWARD:
        return layer->forward;
    case OF_TASK_INPUT_GRADIENT:
        return layer->input_gradient * share;
    case OF_TASK_SECOND_INPUT_GRADIENT:
        return layer->input_gradient * (1 - share);
    case OF_TASK_WEIGHT_GRADIENT:
        return layer->weight_gradient;
    default:
        return layer->update;
    }
}

size_t of_pipeline_group(const of_pipeline *p, size_t layer) {
    return p->micro_batches * (size_t)p->places[layer].replicas;
}

static size_t rounded_up(size_t batches, size_t group) {
    return batches + (group - batches % group) % group;
}

size_t of_updated_batches(const of_pipeline *p, size_t layer, size_t batches) {
    return rounded_up(batches, (size_t)p->places[layer].replicas);
}

size_t of_most_updated_batches(const of_pipeline *p, size_t batches) {
    size_t most = batches;
    for (size_t i = 0; i < p->n; i++)
        if (of_updated_batches(p, i, batches) > most)
            most = of_updated_batches(p, i, batches);
    return most;
}

bool of_is_of_batch(const of_pipeline *p, int kind, size_t layer, size_t batch, size_t batches) {
    return batch < (kind == OF_TASK_UPDATE ? of_updated_batches(p, layer, batches) : batches);
}

/* A group of micro-batches has one update, one of replicas one for each of them. */
static size_t updates_of(const of_pipeline *p, size_t layer, size_t batches) {
    const size_t updated = of_updated_batches(p, layer, batches);
    return rounded_up(updated, p->micro_batches) / p->micro_batches;
}

size_t of_pipeline_count(const of_pipeline *p, size_t batches) {
    const size_t first_trained = of_first_trained(p);
    size_t n = 0;
    for (size_t i = 0; i < p->n; i++)
        for (int kind = 0; kind < OF_TASK_KINDS; kind++)
            if (of_has_task(p, first_trained, kind, i))
                n += kind == OF_TASK_UPDATE ? updates_of(p, i, batches) : batches;
    return n;
}
