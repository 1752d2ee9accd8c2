/* SPDX-License-Identifier: BSD-3-Clause */
/* reorder.c: which weight gradients are held in a backward pass, in which turn, and what they
 * keep in memory. */
#include "planners/reorder/reorder.h"

#include <stdlib.h>

#include "fail.h"

static void place_at_once(size_t n, uint32_t *places) {
    for (size_t i = 0; i < n; i++)
        places[i] = OF_REORDER_AT_ONCE;
}

static void place_last(size_t n, uint32_t *places) {
    for (size_t i = 0; i < n; i++)
        places[i] = (uint32_t)(n - 1 - i);
}

static void place_reverse_first(size_t k, size_t n, uint32_t *places) {
    for (size_t i = 0; i < n; i++)
        places[i] = i < k ? (uint32_t)i : OF_REORDER_AT_ONCE;
}

static void place_chosen(const bool *held, size_t n, uint32_t *places) {
    uint32_t turn = 0;
    for (size_t i = 0; i < n; i++)
        places[i] = held[i] ? turn++ : OF_REORDER_AT_ONCE;
}

/* Whether what a held dW needs fits into what is left of a budget; compared so that no sum can
 * overflow. */
static bool fits(const of_layer_work *layer, uint64_t left) {
    return layer->input_bytes <= left && layer->output_bytes <= left - layer->input_bytes;
}

static void place_budget(uint64_t left, const of_layer_work *layers, size_t n, uint32_t *places) {
    uint32_t turn = 0;
    for (size_t i = n; i-- > 0;) {
        places[i] = OF_REORDER_AT_ONCE;
        if (fits(&layers[i], left)) {
            left -= layers[i].input_bytes + layers[i].output_bytes;
            places[i] = turn++;
        }
    }
}

/* Everything that can fail happens here. */
static of_status check_choice(const of_reorder_choice *choice, const of_layer_work *layers,
                              size_t n, const uint32_t *places) {
    if (!choice || (n && !places))
        return of_fail(OF_INVALID, "places of weight gradients need a choice and an array");
    if (n >= OF_REORDER_AT_ONCE)
        return of_fail(OF_INVALID, "%zu layers are more than there are turns: at most %u", n,
                       (unsigned)OF_REORDER_AT_ONCE - 1);
    if (choice->schedule == OF_REORDER_REVERSE_FIRST && choice->k > n)
        return of_fail(OF_INVALID,
                       "the weight gradients of the first %zu layers can't be held: there are %zu "
                       "layers. Pass a k from 0 to %zu",
                       choice->k, n, n);
    if (choice->schedule == OF_REORDER_BUDGET && n && !layers)
        return of_fail(OF_INVALID, "a budget of bytes needs the layers' bytes");
    if (choice->schedule == OF_REORDER_CHOSEN && n && !choice->held)
        return of_fail(OF_INVALID, "chosen weight gradients need one flag for each layer");
    if ((unsigned)choice->schedule > OF_REORDER_CHOSEN)
        return of_fail(OF_INVALID, "there is no schedule %d of weight gradients",
                       (int)choice->schedule);
    return OF_OK;
}

of_status of_reorder_places(const of_reorder_choice *choice, const of_layer_work *layers, size_t n,
                            uint32_t *places) {
    const of_status status = check_choice(choice, layers, n, places);
    if (status != OF_OK)
        return status;
    switch (choice->schedule) {
    case OF_REORDER_STOCK:
        place_at_once(n, places);
        break;
    case OF_REORDER_LAST:
        place_last(n, places);
        break;
    case OF_REORDER_REVERSE_FIRST:
        place_reverse_first(choice->k, n, places);
        break;
    case OF_REORDER_BUDGET:
        place_budget(choice->budget_bytes, layers, n, places);
        break;
    case OF_REORDER_CHOSEN:
        place_chosen(choice->held, n, places);
        break;
    }
    return OF_OK;
}

static size_t count_held(const uint32_t *places, size_t n) {
    size_t held = 0;
    for (size_t i = 0; i < n; i++)
        held += places[i] != OF_REORDER_AT_ONCE;
    return held;
}

/* With as many turns as held layers, each is taken once if none is taken twice. */
static bool order_held(const uint32_t *places, size_t n, size_t held, uint32_t *order) {
    for (size_t turn = 0; turn < held; turn++)
        order[turn] = OF_REORDER_AT_ONCE;
    for (size_t i = 0; i < n; i++) {
        if (places[i] == OF_REORDER_AT_ONCE)
            continue;
        if (places[i] >= held || order[places[i]] != OF_REORDER_AT_ONCE)
            return false;
        order[places[i]] = (uint32_t)i;
    }
    return true;
}

of_status of_reorder_order(const uint32_t *places, size_t n, uint32_t *order, size_t *n_held) {
    if (!n_held || (n && (!places || !order)))
        return of_fail(OF_INVALID, "the order of weight gradients needs places and two outputs");
    const size_t held = n < OF_REORDER_AT_ONCE ? count_held(places, n) : 0;
    if (n >= OF_REORDER_AT_ONCE || !order_held(places, n, held, order))
        return of_fail(OF_INVALID,
                       "these places of weight gradients are not valid: of m layers that are held, "
                       "each must have a turn of its own from 0 to m - 1. Take the places from "
                       "of_reorder_places()");
    *n_held = held;
    return OF_OK;
}

/* The same in memory of its own, which the caller frees. */
static of_status ordered(const uint32_t *places, size_t n, uint32_t **order, size_t *n_held) {
    uint32_t *memory = n < OF_REORDER_AT_ONCE ? calloc(n + 1, sizeof *memory) : NULL;
    if (!memory)
        return of_fail(OF_NO_MEMORY, "out of memory for the order of %zu layers", n);
    const of_status status = of_reorder_order(places, n, memory, n_held);
    if (status == OF_OK)
        *order = memory;
    else
        free(memory);
    return status;
}

bool of_reorder_is_valid(const uint32_t *places, size_t n) {
    uint32_t *order = NULL;
    size_t held;
    if (n && !places)
        return false;
    const bool valid = ordered(places, n, &order, &held) == OF_OK;
    free(order);
    return valid;
}

/* Whether no sum of these bytes can overflow. */
static bool adds_up(const of_layer_work *layers, size_t n) {
    uint64_t left = UINT64_MAX - 1;
    for (size_t i = 0; i < n; i++) {
        const uint64_t bytes[] = {layers[i].input_bytes, layers[i].input_bytes,
                                  layers[i].output_bytes, layers[i].weight_bytes};
        for (size_t k = 0; k < sizeof bytes / sizeof *bytes; k++) {
            if (bytes[k] > left)
                return false;
            left -= bytes[k];
        }
    }
    return true;
}

typedef struct memory {
    uint64_t now; /* bytes alive */
    uint64_t peak;
} memory;

static void use(memory *m, uint64_t bytes) {
    m->now += bytes;
    if (m->now > m->peak)
        m->peak = m->now;
}

static void run_input_gradient(memory *m, const of_layer_work *layer) {
    use(m, layer->output_bytes);
    if (layer->has_input_gradient)
        use(m, layer->input_bytes);
}

static void run_weight_gradient(memory *m, const of_layer_work *layer) {
    use(m, layer->weight_bytes);
    m->now -= layer->input_bytes + layer->output_bytes;
    if (layer->frees_gradient)
        m->now -= layer->weight_bytes;
}

/* places and order: NULL for stock's. */
static uint64_t peak_of(const of_layer_work *layers, size_t n, const uint32_t *places,
                        const uint32_t *order, size_t n_held) {
    memory m = {0};
    for (size_t i = 0; i < n; i++)
        use(&m, layers[i].input_bytes);
    for (size_t i = n; i-- > 0;) {
        run_input_gradient(&m, &layers[i]);
        if (!places || places[i] == OF_REORDER_AT_ONCE)
            run_weight_gradient(&m, &layers[i]);
        if (layers[i].has_input_gradient) /* from here on it is the dY of the layer before */
            m.now -= layers[i].input_bytes;
    }
    for (size_t turn = 0; turn < n_held; turn++)
        run_weight_gradient(&m, &layers[order[turn]]);
    return m.peak;
}

of_status of_reorder_peak_bytes(const of_layer_work *layers, size_t n, const uint32_t *places,
                                uint64_t *bytes) {
    uint32_t *order = NULL;
    size_t n_held = 0;
    if (!bytes || (n && !layers))
        return of_fail(OF_INVALID, "a peak of memory needs the layers' bytes and an output");
    if (!adds_up(layers, n))
        return of_fail(OF_INVALID, "the bytes of %zu layers do not fit 64 bits: check them", n);
    const of_status status = places ? ordered(places, n, &order, &n_held) : OF_OK;
    if (status == OF_OK)
        *bytes = peak_of(layers, n, places, order, n_held);
    free(order);
    return status;
}

uint64_t of_reorder_extra_bytes(const of_layer_work *layers, size_t n, const uint32_t *places) {
    uint64_t stock = 0, reordered = 0;
    if (of_reorder_peak_bytes(layers, n, NULL, &stock) != OF_OK ||
        of_reorder_peak_bytes(layers, n, places, &reordered) != OF_OK)
        return UINT64_MAX;
    return reordered > stock ? reordered - stock : 0;
}
