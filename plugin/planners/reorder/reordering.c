/* SPDX-License-Identifier: BSD-3-Clause */
/* reordering.c: see reordering.h. Priorities: those that wait have a range each, the first
 * turn the highest. Within its range a later use of the layer comes first, as in stock, so
 * that its gradients are added up in the same order. */
#include "planners/reorder/reordering.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "guard.h"

/* The state of one layer. */
typedef struct of_layer_state {
    of_layer_work work; /* of all uses in the last forward pass; with seconds, if rehearsed */
    uint32_t place;
    uint32_t live;    /* uses that the host has not forgotten */
    uint32_t waiting; /* dW that wait now */
    uint32_t waited;  /* since none did */
    uint64_t kept;    /* counted in of_reordering.held */
    uint64_t pass;    /* in which it was decided whether this layer waits */
    bool waits;       /* in that pass */
    bool used;        /* in the last forward pass */
    bool held;        /* OF_REORDER_CHOSEN: it waits */
    bool fixed;
    bool recomputed;
} of_layer_state;

struct of_reordering {
    atomic_int references;
    pthread_mutex_t lock; /* everything below */
    of_reorder_choice choice;
    bool stopped;
    bool backward;   /* since the last forward pass */
    uint64_t passes; /* of backward */
    size_t n;
    size_t n_used;
    size_t n_waiting; /* layers of the plan that wait */
    size_t live;
    uint64_t held, most_held;
    atomic_bool rehearses;
    double ended; /* the last rehearsal of this forward pass; 0: none */
    of_layer_state *layers;
    size_t *order; /* n_used layers of the last forward pass */
    /* Room for a plan, in that order; work: for one more. */
    of_layer_work *work;
    bool *chosen;
    uint32_t *places;
    size_t *by_turn; /* layers */
};

static void free_all(of_reordering *r) {
    pthread_mutex_destroy(&r->lock);
    free(r->layers);
    free(r->order);
    free(r->work);
    free(r->chosen);
    free(r->places);
    free(r->by_turn);
    free(r);
}

static bool allocate(of_reordering *r, size_t n) {
    const size_t room = n == 0 ? 1 : n;
    r->layers = calloc(room, sizeof *r->layers);
    r->order = calloc(room, sizeof *r->order);
    r->work = calloc(room + 1, sizeof *r->work);
    r->chosen = calloc(room, sizeof *r->chosen);
    r->places = calloc(room, sizeof *r->places);
    r->by_turn = calloc(room, sizeof *r->by_turn);
    return r->layers != NULL && r->order != NULL && r->work != NULL && r->chosen != NULL &&
           r->places != NULL && r->by_turn != NULL;
}

of_status of_reordering_create(const of_reorder_choice *choice, const bool *fixed, size_t n,
                               of_reordering **out) {
    *out = NULL;
    if (n >= OF_PRIORITIES) {
        of_set_error("%zu layers are more than the %d that can wait", n, OF_PRIORITIES - 1);
        return OF_INVALID;
    }
    of_reordering *r = calloc(1, sizeof *r);
    if (r == NULL || pthread_mutex_init(&r->lock, NULL) != 0) {
        free(r);
        of_set_error("no memory for the layers of a model");
        return OF_NO_MEMORY;
    }
    if (!allocate(r, n)) {
        free_all(r);
        of_set_error("no memory for %zu layers", n);
        return OF_NO_MEMORY;
    }
    for (size_t i = 0; i < n; i++) {
        r->layers[i].held = choice->held != NULL && choice->held[i];
        r->layers[i].fixed = fixed != NULL && fixed[i];
    }
    atomic_init(&r->references, 1);
    r->choice = *choice;
    r->choice.held = r->chosen;
    r->n = n;
    *out = r;
    return OF_OK;
}

void of_reordering_retain(of_reordering *r) {
    atomic_fetch_add(&r->references, 1);
}

void of_reordering_release(of_reordering *r) {
    if (r != NULL && atomic_fetch_sub(&r->references, 1) == 1)
        free_all(r);
}

void of_reordering_stop(of_reordering *r) {
    pthread_mutex_lock(&r->lock);
    r->stopped = true;
    pthread_mutex_unlock(&r->lock);
}

/* The forward pass */

static void begin_forward(of_reordering *r) {
    for (size_t i = 0; i < r->n_used; i++) {
        of_layer_state *layer = &r->layers[r->order[i]];
        layer->used = layer->recomputed = false;
        layer->work = (of_layer_work){0};
        layer->place = OF_REORDER_AT_ONCE;
    }
    r->n_used = 0;
    r->ended = 0;
    r->backward = false;
}

/* A layer that backward computes once more had its place in the forward pass; a use without a graph
 * has none, and does not wait. */
static void note_use(of_reordering *r, size_t number, const of_layer_use *use) {
    of_layer_state *layer = &r->layers[number];
    if (use->recomputed && layer->used)
        return;
    if (!use->recomputed && (r->backward || r->live == 0))
        begin_forward(r);
    if (!layer->used)
        r->order[r->n_used++] = number;
    layer->used = true;
    layer->recomputed = use->recomputed;
    layer->place = OF_REORDER_AT_ONCE;
    layer->work.input_bytes += use->input_bytes;
    layer->work.output_bytes += use->output_bytes;
    layer->work.weight_bytes = use->weight_bytes;
    layer->work.has_input_gradient |= use->has_input_gradient;
    layer->work.frees_gradient = use->frees_gradient;
}

/* The number of priorities that each layer has. */
static size_t range(const of_reordering *r) {
    return (OF_PRIORITIES - 1) / (r->n == 0 ? 1 : r->n);
}

static bool on_use(void *ctx, size_t layer, const of_layer_use *use) {
    of_reordering *r = ctx;
    pthread_mutex_lock(&r->lock);
    /* A use that comes after more than a range can be told apart stays stock's: its dW is
     * then the first, as it should be. */
    const bool fits = !r->stopped && layer < r->n && r->layers[layer].live < range(r);
    if (fits) {
        note_use(r, layer, use);
        r->layers[layer].live++;
        r->live++;
    }
    pthread_mutex_unlock(&r->lock);
    return fits;
}

static void on_forget(void *ctx, size_t layer) {
    of_reordering *r = ctx;
    pthread_mutex_lock(&r->lock);
    r->layers[layer].live--;
    r->live--;
    pthread_mutex_unlock(&r->lock);
}

/* The plan */

static bool may_wait(const of_layer_state *layer) {
    return !layer->fixed && !layer->recomputed;
}

/* Turns without gaps: those of layers that may not wait are taken out. */
static void close_gaps(of_reordering *r) {
    size_t turns = 0;
    for (size_t i = 0; i < r->n_used; i++)
        if (r->places[i] != OF_REORDER_AT_ONCE) {
            r->by_turn[r->places[i]] = r->order[i];
            turns++;
        }
    r->n_waiting = 0;
    for (size_t turn = 0; turn < turns; turn++) {
        of_layer_state *layer = &r->layers[r->by_turn[turn]];
        layer->place = may_wait(layer) ? (uint32_t)r->n_waiting++ : OF_REORDER_AT_ONCE;
    }
    for (size_t i = 0; i < r->n_used; i++)
        r->places[i] = r->layers[r->order[i]].place;
}

static of_status make_plan(of_reordering *r) {
    for (size_t i = 0; i < r->n_used; i++) {
        const of_layer_state *layer = &r->layers[r->order[i]];
        r->work[i] = layer->work;
        r->chosen[i] = layer->held;
    }
    of_reorder_choice choice = r->choice;
    if (choice.k > r->n_used) /* not all layers of the model were used */
        choice.k = r->n_used;
    const of_status status = of_reorder_places(&choice, r->work, r->n_used, r->places);
    for (size_t i = 0; i < r->n_used; i++)
        r->layers[r->order[i]].place = OF_REORDER_AT_ONCE;
    if (status == OF_OK)
        close_gaps(r);
    return status;
}

of_status of_reordering_plan(of_reordering *r, of_reordered *rows, size_t capacity, size_t *n,
                             uint64_t *extra_bytes) {
    pthread_mutex_lock(&r->lock);
    const of_status status = r->backward ? OF_OK : make_plan(r);
    *n = r->n_used;
    for (size_t i = 0; i < r->n_used && i < capacity; i++) {
        const of_layer_state *layer = &r->layers[r->order[i]];
        rows[i] = (of_reordered){.layer = r->order[i],
                                 .work = layer->work,
                                 .place = layer->place,
                                 .fixed = layer->fixed,
                                 .recomputed = layer->recomputed};
    }
    *extra_bytes = of_reorder_extra_bytes(r->work, r->n_used, r->places);
    pthread_mutex_unlock(&r->lock);
    return status;
}

/* Backward */

static bool fits(const of_reordering *r, uint64_t bytes) {
    const uint64_t budget = r->choice.budget_bytes;
    return r->choice.schedule != OF_REORDER_BUDGET || !OF_GUARD(budget) ||
           (bytes <= budget && r->held <= budget - bytes);
}

/* All uses of a layer in a pass wait, or none: else their gradients would be added up in another
 * order. Another pass may have failed before its dW ran, and its graph still be there. */
static bool begins_to_wait(of_reordering *r, of_layer_state *layer, uint64_t bytes) {
    const bool is_decided = layer->pass == r->passes && (layer->kept != 0 || !layer->waits);
    if (is_decided || layer->place == OF_REORDER_AT_ONCE)
        return layer->waits && layer->place != OF_REORDER_AT_ONCE;
    const uint64_t planned = layer->work.input_bytes + layer->work.output_bytes;
    const uint64_t all = bytes > planned ? bytes : planned;
    layer->pass = r->passes;
    layer->waits = fits(r, all);
    if (!layer->waits)
        return false;
    layer->kept += all;
    r->held += all;
    if (r->held > r->most_held)
        r->most_held = r->held;
    return true;
}

static uint64_t on_wait(void *ctx, size_t number, uint64_t bytes) {
    of_reordering *r = ctx;
    of_layer_state *layer = &r->layers[number];
    uint64_t priority = 0;
    pthread_mutex_lock(&r->lock);
    if (!r->backward && make_plan(r) == OF_OK) {
        r->backward = true;
        r->passes++;
    }
    if (!r->stopped && begins_to_wait(r, layer, bytes)) {
        const size_t turn = OF_GUARD(order) ? layer->place : r->n_waiting - 1 - layer->place;
        if (layer->waiting++ == 0)
            layer->waited = 0;
        priority = (r->n_waiting - turn) * range(r) - layer->waited++ % range(r);
    }
    pthread_mutex_unlock(&r->lock);
    return priority;
}

static void on_done(void *ctx, size_t number) {
    of_reordering *r = ctx;
    of_layer_state *layer = &r->layers[number];
    pthread_mutex_lock(&r->lock);
    if (--layer->waiting == 0) {
        r->held -= layer->kept;
        layer->kept = 0;
    }
    pthread_mutex_unlock(&r->lock);
}

/* Times */

void of_reordering_rehearse(of_reordering *r, bool on) {
    atomic_store(&r->rehearses, on);
}

static bool is_rehearsed(void *ctx) {
    of_reordering *r = ctx;
    return atomic_load_explicit(&r->rehearses, memory_order_relaxed);
}

/* The time before a layer in the forward pass is that of activations, norms and the like, whose
 * backward is taken to last as long. */
static void on_rehearsed(void *ctx, size_t number, const of_layer_rehearsal *found) {
    of_reordering *r = ctx;
    pthread_mutex_lock(&r->lock);
    const double before = r->ended != 0 ? of_later(found->began - r->ended, 0) : 0;
    of_layer_work *work = &r->layers[number].work;
    work->forward += before + found->forward;
    work->input_gradient += before + found->input_gradient;
    work->weight_gradient += found->weight_gradient;
    r->ended = found->ended;
    pthread_mutex_unlock(&r->lock);
}

/* The layers as the simulator sees them, behind one that stands for the parameters before them,
 * whose gradient comes with the last dX. A layer that may not wait shares its weight with such a
 * parameter, or has nothing to send in its turn: its dW is a part of its dX. */
static void put_work(of_reordering *r, uint64_t bytes_before) {
    r->work[0] = (of_layer_work){.weight_bytes = bytes_before};
    for (size_t i = 0; i < r->n_used; i++) {
        const of_layer_state *layer = &r->layers[r->order[i]];
        of_layer_work *work = &r->work[i + 1];
        *work = layer->work;
        if (may_wait(layer))
            continue;
        r->work[0].weight_bytes += work->weight_bytes;
        work->input_gradient += work->weight_gradient;
        work->weight_gradient = 0;
        work->weight_bytes = 0;
        work->has_input_gradient = true;
    }
}

static of_status simulate_stock(const of_reordering *r, const of_network *network,
                                bool await_first_use, of_reorder_times *times) {
    const of_reorder_choice stock = {.schedule = OF_REORDER_REVERSE_FIRST, .k = 0};
    uint32_t *places = calloc(r->n_used + 1, sizeof *places);
    if (places == NULL) {
        of_set_error("no memory for the places of %zu layers", r->n_used);
        return OF_NO_MEMORY;
    }
    of_status status = of_reorder_places(&stock, r->work, r->n_used + 1, places);
    if (status == OF_OK)
        status =
            of_reorder_simulate(r->work, r->n_used + 1, places, network, await_first_use, times);
    free(places);
    return status;
}

/* One that holds the parameters before the layers alone is stock's order. */
static of_status search(const of_reordering *r, const of_network *network, bool await_first_use,
                        uint64_t extra_bytes_allowed, of_reordering_best *best) {
    size_t k = 0;
    of_status status = simulate_stock(r, network, await_first_use, &best->stock);
    if (status == OF_OK)
        status = of_reorder_best_k(r->work, r->n_used + 1, network, await_first_use,
                                   extra_bytes_allowed, &k, &best->times);
    if (status != OF_OK)
        return status;
    const double least = (1 + OF_REORDERING_WORTH) * best->times.iteration;
    best->k = k > 1 && best->stock.iteration >= least ? k - 1 : 0;
    if (best->k == 0)
        best->times = best->stock;
    return OF_OK;
}

of_status of_reordering_best_k(of_reordering *r, const of_network *network, bool await_first_use,
                               uint64_t bytes_before, uint64_t extra_bytes_allowed,
                               of_reordering_best *best) {
    pthread_mutex_lock(&r->lock);
    put_work(r, bytes_before);
    const of_status status = search(r, network, await_first_use, extra_bytes_allowed, best);
    pthread_mutex_unlock(&r->lock);
    return status;
}

void of_reordering_choose(of_reordering *r, const of_reorder_choice *choice) {
    pthread_mutex_lock(&r->lock);
    r->choice = *choice;
    r->choice.held = r->chosen;
    pthread_mutex_unlock(&r->lock);
}

void of_reordering_held(of_reordering *r, uint64_t *now, uint64_t *most) {
    pthread_mutex_lock(&r->lock);
    *now = r->held;
    *most = r->most_held;
    pthread_mutex_unlock(&r->lock);
}

static void retain(void *ctx) {
    of_reordering_retain(ctx);
}
static void release(void *ctx) {
    of_reordering_release(ctx);
}

of_layer_user of_reordering_user(of_reordering *r) {
    return (of_layer_user){.struct_size = sizeof(of_layer_user),
                           .ctx = r,
                           .retain = retain,
                           .release = release,
                           .use = on_use,
                           .forget = on_forget,
                           .wait = on_wait,
                           .done = on_done,
                           .is_rehearsed = is_rehearsed,
                           .rehearsed = on_rehearsed};
}
