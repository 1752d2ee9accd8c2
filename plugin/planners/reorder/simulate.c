/* SPDX-License-Identifier: BSD-3-Clause */
/* simulate.c: how long an iteration of data parallel training takes whose weight
 * gradients run at given places.
 *
 * Every layer of a forward pass waits for its bucket, so when the next backward pass begins, the
 * network has nothing left to do. So each iteration is like the first, and one is simulated,
 * from the beginning of its backward pass to the end of the next forward pass. */
#include <stdlib.h>

#include "fail.h"
#include "planners/reorder/reorder.h"

typedef struct bucket {
    double through; /* when its message is */
    double update;  /* seconds, of its layers */
} bucket;

typedef struct simulation {
    const of_layer_work *layers; /* n of them */
    size_t n;
    const of_network *network;
    uint32_t *order; /* of the n_held layers whose dW is held */
    size_t n_held;
    size_t *bucket_of; /* of each layer that has weight_bytes */
    bucket *buckets;   /* room for n */
    size_t n_closed;   /* the next one is open */
    size_t n_taken_up;
    uint64_t open_bytes;
    double now; /* of compute */
    of_reorder_times times;
} simulation;

static void compute(simulation *s, double seconds) {
    s->now += seconds;
    s->times.compute += seconds;
}

static void send_bucket(simulation *s) {
    const double network_is_free = s->n_closed ? s->buckets[s->n_closed - 1].through : 0;
    const double took = of_seconds_over(&s->network->link, s->open_bytes);
    s->buckets[s->n_closed++].through = of_later(s->now, network_is_free) + took;
    s->times.communication += took;
    s->open_bytes = 0;
}

static void add_to_bucket(simulation *s, size_t layer) {
    const uint64_t bytes = s->layers[layer].weight_bytes;
    const uint64_t cap = s->n_closed ? s->network->bucket_bytes : s->network->first_bucket_bytes;
    s->bucket_of[layer] = s->n_closed;
    s->buckets[s->n_closed].update += s->layers[layer].update;
    s->open_bytes += bytes < UINT64_MAX - s->open_bytes ? bytes : UINT64_MAX - s->open_bytes;
    if (s->open_bytes >= cap)
        send_bucket(s);
}

static void weight_gradient(simulation *s, size_t layer) {
    compute(s, s->layers[layer].weight_gradient);
    if (s->layers[layer].weight_bytes)
        add_to_bucket(s, layer);
}

static void backward(simulation *s, const uint32_t *places) {
    for (size_t i = s->n; i-- > 0;) {
        if (s->layers[i].has_input_gradient)
            compute(s, s->layers[i].input_gradient);
        if (places[i] == OF_REORDER_AT_ONCE)
            weight_gradient(s, i);
    }
    for (size_t turn = 0; turn < s->n_held; turn++)
        weight_gradient(s, s->order[turn]);
    if (s->open_bytes)
        send_bucket(s);
}

static void take_up(simulation *s, size_t n_buckets) {
    for (; s->n_taken_up < n_buckets; s->n_taken_up++) {
        const bucket *next = &s->buckets[s->n_taken_up];
        if (next->through > s->now) {
            s->times.exposed += next->through - s->now;
            s->now = next->through;
        }
        compute(s, next->update);
    }
}

static void forward(simulation *s, bool await_first_use) {
    if (!await_first_use)
        take_up(s, s->n_closed);
    for (size_t i = 0; i < s->n; i++) {
        if (s->layers[i].weight_bytes)
            take_up(s, s->bucket_of[i] + 1);
        compute(s, s->layers[i].forward);
    }
    s->times.iteration = s->now;
}

static of_status check_layers(const of_layer_work *layers, size_t n) {
    for (size_t i = 0; i < n; i++) {
        const of_layer_work *l = &layers[i];
        if (!of_is_time(l->forward) || !of_is_time(l->input_gradient) ||
            !of_is_time(l->weight_gradient) || !of_is_time(l->update))
            return of_fail(OF_INVALID,
                           "layer %zu has times of %g, %g, %g and %g s (forward, input gradient, "
                           "weight gradient, update): none may be negative or infinite",
                           i, l->forward, l->input_gradient, l->weight_gradient, l->update);
        if (l->update > 0 && !l->weight_bytes)
            return of_fail(
                OF_INVALID,
                "layer %zu has an update of %g s and no weight_bytes: give these, or no update", i,
                l->update);
    }
    return OF_OK;
}

static of_status check(const of_layer_work *layers, size_t n, const of_network *network,
                       const void *out) {
    if (!network || !out || (n && !layers))
        return of_fail(OF_INVALID, "a simulation needs layers, a network and an output");
    if (n >= OF_REORDER_AT_ONCE)
        return of_fail(OF_INVALID, "%zu layers are more than there are turns", n);
    const of_status status = of_check_network_link(&network->link);
    return status == OF_OK ? check_layers(layers, n) : status;
}

static of_status prepare(simulation *s, const uint32_t *places) {
    s->order = calloc(s->n + 1, sizeof *s->order);
    s->bucket_of = calloc(s->n + 1, sizeof *s->bucket_of);
    s->buckets = calloc(s->n + 1, sizeof *s->buckets);
    if (!s->order || !s->bucket_of || !s->buckets)
        return of_fail(OF_NO_MEMORY, "out of memory for a simulation of %zu layers", s->n);
    return of_reorder_order(places, s->n, s->order, &s->n_held);
}

static void release(simulation *s) {
    free(s->order);
    free(s->bucket_of);
    free(s->buckets);
}

of_status of_reorder_simulate(const of_layer_work *layers, size_t n, const uint32_t *places,
                              const of_network *network, bool await_first_use,
                              of_reorder_times *out) {
    simulation s = {.layers = layers, .n = n, .network = network};
    of_status status = check(layers, n, network, out);
    if (status == OF_OK)
        status = prepare(&s, places);
    if (status == OF_OK) {
        backward(&s, places);
        forward(&s, await_first_use);
        *out = s.times;
    }
    release(&s);
    return status;
}

/* The best of the k tried so far. */
typedef struct search {
    const of_layer_work *layers;
    size_t n;
    const of_network *network;
    bool await_first_use;
    uint64_t bytes_allowed; /* peak */
    uint32_t *places;
    size_t k;
    of_reorder_times times;
} search;

static of_status try_k(search *s, size_t k) {
    const of_reorder_choice choice = {.schedule = OF_REORDER_REVERSE_FIRST, .k = k};
    of_reorder_times times;
    uint64_t bytes;
    of_status status = of_reorder_places(&choice, s->layers, s->n, s->places);
    if (status == OF_OK)
        status = of_reorder_peak_bytes(s->layers, s->n, s->places, &bytes);
    if (status != OF_OK || bytes > s->bytes_allowed)
        return status;
    status =
        of_reorder_simulate(s->layers, s->n, s->places, s->network, s->await_first_use, &times);
    if (status == OF_OK && (k == 0 || times.iteration < (1 - 1e-9) * s->times.iteration)) {
        s->k = k;
        s->times = times;
    }
    return status;
}

static of_status search_all(search *s, uint64_t extra_bytes_allowed) {
    of_status status = of_reorder_peak_bytes(s->layers, s->n, NULL, &s->bytes_allowed);
    const uint64_t most = UINT64_MAX - s->bytes_allowed;
    s->bytes_allowed += extra_bytes_allowed < most ? extra_bytes_allowed : most;
    for (size_t k = 0; k <= s->n && status == OF_OK; k++)
        status = try_k(s, k);
    return status;
}

of_status of_reorder_best_k(const of_layer_work *layers, size_t n, const of_network *network,
                            bool await_first_use, uint64_t extra_bytes_allowed, size_t *k,
                            of_reorder_times *out) {
    search s = {.layers = layers, .n = n, .network = network, .await_first_use = await_first_use};
    of_status status = check(layers, n, network, out);
    if (status != OF_OK)
        return status;
    if (!k)
        return of_fail(OF_INVALID, "a search of k needs an output for it");
    s.places = calloc(n + 1, sizeof *s.places);
    if (!s.places)
        return of_fail(OF_NO_MEMORY, "out of memory for the places of %zu layers", n);
    status = search_all(&s, extra_bytes_allowed);
    free(s.places);
    if (status == OF_OK) {
        *k = s.k;
        *out = s.times;
    }
    return status;
}
