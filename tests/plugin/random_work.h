/* SPDX-License-Identifier: BSD-3-Clause */
/* random_work.h: layers, networks and places for the tests of reorder.h, from a fixed seed. All
 * times are small whole numbers of seconds, so that sums of them are exact in any order. */
#ifndef RANDOM_WORK_H
#define RANDOM_WORK_H

#include "planners/reorder/reorder.h"

enum { MOST_LAYERS = 12 };

static uint64_t random_state = 0x9E3779B97F4A7C15u;

/* Below `end`, by xorshift64*. */
static inline uint64_t random_below(uint64_t end) {
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (random_state * 0x2545F4914F6CDD1Du >> 33) % end;
}

static inline of_layer_work random_layer(void) {
    of_layer_work layer = {
        .input_bytes = random_below(100),
        .output_bytes = random_below(100),
        .weight_bytes = random_below(5) ? 1 + random_below(40) : 0,
        .has_input_gradient = random_below(8) != 0,
        .forward = (double)random_below(10),
        .input_gradient = (double)random_below(10),
        .weight_gradient = (double)random_below(10),
        .frees_gradient = random_below(2) != 0,
    };
    if (layer.weight_bytes && random_below(2))
        layer.update = (double)random_below(5);
    return layer;
}

static inline size_t random_layers(of_layer_work *layers) {
    const size_t n = 1 + random_below(MOST_LAYERS);
    for (size_t i = 0; i < n; i++)
        layers[i] = random_layer();
    layers[0].has_input_gradient = random_below(2) != 0;
    return n;
}

static inline of_network random_network(void) {
    return (of_network){
        .link.latency = (double)random_below(10),
        .link.seconds_per_byte = (double)random_below(3),
        .bucket_bytes = random_below(120),
        .first_bucket_bytes = random_below(40),
    };
}

/* Any number of layers held, in any order. */
static inline void random_places(size_t n, uint32_t *places) {
    uint32_t held[MOST_LAYERS];
    uint32_t n_held = 0;
    for (size_t i = 0; i < n; i++) {
        places[i] = OF_REORDER_AT_ONCE;
        if (random_below(2))
            held[n_held++] = (uint32_t)i;
    }
    for (uint32_t turn = 0; n_held; turn++) {
        const uint64_t taken = random_below(n_held);
        places[held[taken]] = turn;
        held[taken] = held[--n_held];
    }
}

#endif
