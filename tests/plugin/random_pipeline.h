/* SPDX-License-Identifier: BSD-3-Clause */
/* random_pipeline.h: pipelines for the tests of pipeline.h, from a fixed seed. */
#ifndef RANDOM_PIPELINE_H
#define RANDOM_PIPELINE_H

#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "pipeline_verify.h"
#include "planners/pipeline/pipeline.h"
#include "random_work.h"

enum { MOST_STAGES = 6, MOST_BATCHES = 14 };

/* A pipeline whose parts live in the struct, and its schedule. */
typedef struct drawn {
    of_pipeline p;
    of_network_link link;
    size_t batches;
    of_pipeline_layer layers[MOST_LAYERS];
    of_pipeline_place places[MOST_LAYERS];
    uint32_t delays[MOST_LAYERS];
    of_pipeline_task *tasks;
    size_t n;
    of_pipeline_report report;
} drawn;

static drawn d; /* the one of the test */

static inline void fresh(void) {
    free(d.tasks);
    d = (drawn){.p = {.micro_batches = 1}};
    d.p.layers = d.layers;
    d.p.places = d.places;
}

/* least: of seconds; 0 lets tasks take no time. */
static inline of_pipeline_layer random_pipeline_layer(uint64_t least) {
    of_pipeline_layer layer = {
        .forward = (double)(least + random_below(20)),
        .input_gradient = (double)(least + random_below(20)),
        .weight_gradient = (double)(least + random_below(20)),
        .update = (double)(least + random_below(5)),
        .in_bytes = random_below(30),
        .out_bytes = random_below(30),
        .weight_bytes = random_below(4) ? 1 + random_below(50) : 0,
    };
    layer.movable = layer.weight_bytes && random_below(3);
    layer.channels = layer.movable ? (uint32_t)(1 + random_below(200)) : 0;
    return layer;
}

static inline int32_t random_process(void) {
    return (int32_t)random_below(d.p.processes);
}

/* Any that a checked pipeline in slots can have, good or bad. */
static inline of_pipeline_place random_place(size_t i, bool has_input_gradient) {
    const int32_t on = random_process();
    of_pipeline_place place = {on, on, on, OF_NO_PROCESS, 0, 1};
    if (!d.layers[i].movable)
        return place;
    place.weight_gradient = random_process();
    if (!has_input_gradient)
        return place;
    place.input_gradient = random_process();
    const uint32_t parts = (d.layers[i].channels - 1) / OF_SPLIT_MULTIPLE;
    if (d.p.strategy == OF_PIPELINE_LAYERPIPE && parts && d.p.processes > 1 && random_below(2)) {
        place.split = (uint32_t)(1 + random_below(parts)) * OF_SPLIT_MULTIPLE;
        place.second_input_gradient = (int32_t)((size_t)(place.input_gradient + 1) % d.p.processes);
    }
    return place;
}

/* The planner's places, or of slots any. */
static inline void place_randomly(void) {
    OK(of_pipeline_place_layers(&d.p, &d.link, d.places, NULL));
    const bool has_slots =
        d.p.strategy == OF_PIPELINE_INTRA || d.p.strategy == OF_PIPELINE_LAYERPIPE;
    if (!has_slots || random_below(2))
        return;
    bool trained = false;
    for (size_t i = 0; i < d.p.n; i++) {
        d.places[i] = random_place(i, trained);
        trained = trained || d.layers[i].weight_bytes;
    }
}

static inline void schedule(void) {
    d.n = of_pipeline_count(&d.p, d.batches);
    free(d.tasks);
    d.tasks = calloc(d.n + 2, sizeof *d.tasks); /* a mutant may have two more */
    ck_assert_ptr_nonnull(d.tasks);
    OK(of_pipeline_delays(&d.p, d.delays));
    OK(of_pipeline_schedule(&d.p, &d.link, d.batches, d.tasks));
}

static inline void simulate(void) {
    OK(of_pipeline_simulate(&d.p, &d.link, d.batches, d.tasks, d.n, &d.report));
}

static inline void run(void) {
    schedule();
    simulate();
}

static inline size_t violations(void) {
    return count_violations(&d.p, &d.link, d.delays, d.batches, d.tasks, d.n);
}

/* With the settings that the strategy has: micro-batches, batches in flight, layers a turn. */
static inline void set_strategy(of_strategy strategy) {
    const bool is_fast = strategy == OF_PIPELINE_FAST_FORWARD || strategy == OF_PIPELINE_MODULO;
    const bool has_groups =
        is_fast || strategy == OF_PIPELINE_GPIPE || strategy == OF_PIPELINE_1F1B_FLUSH;
    d.p.strategy = strategy;
    d.p.micro_batches = has_groups ? 1 + random_below(5) : 1;
    d.p.in_flight = is_fast ? random_below(5) : 0;
    d.p.chunk = strategy == OF_PIPELINE_MODULO ? 1 + random_below(3) : 0;
}

/* Simulated. */
static inline void draw(uint64_t least_seconds) {
    fresh();
    d.p.n = 1 + random_below(MOST_LAYERS);
    set_strategy((of_strategy)random_below(OF_PIPELINE_STRATEGIES));
    d.p.processes = 1 + random_below(MOST_STAGES);
    d.batches = 1 + random_below(MOST_BATCHES);
    d.link.latency = (double)random_below(6);
    d.link.seconds_per_byte = (double)random_below(3) / 4;
    for (size_t i = 0; i < d.p.n; i++)
        d.layers[i] = random_pipeline_layer(least_seconds);
    place_randomly();
    run();
}

#endif
