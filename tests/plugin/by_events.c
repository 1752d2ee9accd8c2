/* SPDX-License-Identifier: BSD-3-Clause */
#include "by_events.h"

#include <check.h>

enum { LAYERS = 16, ITERATIONS = 4, MESSAGES = LAYERS * ITERATIONS };

typedef enum task_kind { FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, UPDATES } task_kind;
typedef struct task {
    task_kind kind;
    size_t of; /* a layer; UPDATES: a message */
} task;

typedef struct message {
    uint64_t bytes;
    double updates; /* seconds */
    bool closed, arrived, updated;
} message;

typedef struct world {
    const of_layer_work *layers;
    size_t n;
    const of_network *network;
    bool await_first_use;

    task program[3 * LAYERS]; /* an iteration of compute, without updates */
    size_t n_tasks, next_task;

    message messages[MESSAGES]; /* of all iterations */
    size_t n_messages;          /* the last may be open */
    size_t message_of[LAYERS];  /* of the last backward pass; SIZE_MAX: none */
    bool first_is_open;         /* the message that comes next is the first of its pass */

    double clock;
    bool computing, sending;
    task computes;
    size_t sends;
    double compute_ends, sending_ends;

    int n_passes;             /* backward passes begun */
    double began[ITERATIONS]; /* when */
    of_reorder_times times;   /* since the last of them began */
    of_reorder_times before;  /* of the iteration before it */
} world;

static void write_program(world *w, const uint32_t *places) {
    for (size_t i = 0; i < w->n; i++)
        w->program[w->n_tasks++] = (task){FORWARD, i};
    for (size_t i = w->n; i-- > 0;) {
        if (w->layers[i].has_input_gradient)
            w->program[w->n_tasks++] = (task){INPUT_GRADIENT, i};
        if (places[i] == OF_REORDER_AT_ONCE)
            w->program[w->n_tasks++] = (task){WEIGHT_GRADIENT, i};
    }
    for (uint32_t turn = 0; turn < w->n; turn++)
        for (size_t i = 0; i < w->n; i++)
            if (places[i] == turn)
                w->program[w->n_tasks++] = (task){WEIGHT_GRADIENT, i};
}

static double seconds(const world *w, task t) {
    switch (t.kind) {
    case FORWARD:
        return w->layers[t.of].forward;
    case INPUT_GRADIENT:
        return w->layers[t.of].input_gradient;
    case WEIGHT_GRADIENT:
        return w->layers[t.of].weight_gradient;
    default:
        return w->messages[t.of].updates;
    }
}

/* Whether what this layer's forward pass needs has been updated. */
static bool is_ready(const world *w, size_t layer) {
    if (w->await_first_use)
        return w->message_of[layer] == SIZE_MAX || w->messages[w->message_of[layer]].updated;
    for (size_t m = 0; m < w->n_messages; m++)
        if (!w->messages[m].updated)
            return false;
    return true;
}

/* The first message that has not been updated, if it has arrived. */
static bool find_updates(const world *w, task *found) {
    for (size_t m = 0; m < w->n_messages; m++)
        if (!w->messages[m].updated) {
            *found = (task){UPDATES, m};
            return w->messages[m].arrived;
        }
    return false;
}

static void begin_pass(world *w) {
    w->began[w->n_passes++] = w->clock;
    w->before = w->times;
    w->times = (of_reorder_times){0};
    w->first_is_open = true;
}

/* Chooses the next task of compute; false: it has to wait. */
static bool choose(world *w, task *chosen) {
    *chosen = w->program[w->next_task];
    if (chosen->kind == FORWARD && !is_ready(w, chosen->of))
        return find_updates(w, chosen);
    if (w->next_task == w->n)
        begin_pass(w);
    w->next_task = w->next_task + 1 < w->n_tasks ? w->next_task + 1 : 0;
    return true;
}

static bool begin_compute(world *w) {
    if (w->computing || !choose(w, &w->computes))
        return false;
    w->computing = true;
    w->compute_ends = w->clock + seconds(w, w->computes);
    w->times.compute += seconds(w, w->computes);
    return true;
}

static bool begin_sending(world *w) {
    for (size_t m = 0; m < w->n_messages && !w->sending; m++) {
        if (!w->messages[m].closed || w->messages[m].arrived)
            continue;
        const double took = w->network->link.latency +
                            (double)w->messages[m].bytes * w->network->link.seconds_per_byte;
        w->sending = true;
        w->sends = m;
        w->sending_ends = w->clock + took;
        w->times.communication += took;
        return true;
    }
    return false;
}

static void gradient_is_complete(world *w, size_t layer) {
    const bool opens = w->n_messages == 0 || w->messages[w->n_messages - 1].closed;
    const uint64_t cap =
        w->first_is_open ? w->network->first_bucket_bytes : w->network->bucket_bytes;
    if (w->layers[layer].weight_bytes == 0)
        return;
    if (opens)
        w->messages[w->n_messages++] = (message){0};
    message *last = &w->messages[w->n_messages - 1];
    w->message_of[layer] = w->n_messages - 1;
    last->bytes += w->layers[layer].weight_bytes;
    last->updates += w->layers[layer].update;
    last->closed = last->bytes >= cap;
    if (last->closed)
        w->first_is_open = false;
}

static void finish_compute(world *w) {
    w->computing = false;
    if (w->computes.kind == UPDATES)
        w->messages[w->computes.of].updated = true;
    if (w->computes.kind == WEIGHT_GRADIENT)
        gradient_is_complete(w, w->computes.of);
    if (w->computes.kind != UPDATES && w->next_task == 0 && w->n_messages)
        w->messages[w->n_messages - 1].closed = true; /* the end of the backward pass */
}

static void finish_sending(world *w) {
    w->sending = false;
    w->messages[w->sends].arrived = true;
}

static void go_to_the_next_event(world *w) {
    ck_assert_msg(w->computing || w->sending, "everybody waits");
    double next = w->computing ? w->compute_ends : w->sending_ends;
    if (w->sending && w->sending_ends < next)
        next = w->sending_ends;
    if (!w->computing)
        w->times.exposed += next - w->clock;
    w->clock = next;
    if (w->computing && w->compute_ends <= w->clock)
        finish_compute(w);
    if (w->sending && w->sending_ends <= w->clock)
        finish_sending(w);
}

of_reorder_times by_events(const of_layer_work *layers, size_t n, const uint32_t *places,
                           const of_network *network, bool await_first_use) {
    world w = {.layers = layers, .n = n, .network = network, .await_first_use = await_first_use};
    write_program(&w, places);
    for (size_t i = 0; i < n; i++)
        w.message_of[i] = SIZE_MAX;
    while (w.n_passes < ITERATIONS) {
        while (begin_compute(&w) || begin_sending(&w))
            ;
        if (w.n_passes < ITERATIONS)
            go_to_the_next_event(&w);
    }
    w.before.iteration = w.began[ITERATIONS - 1] - w.began[ITERATIONS - 2];
    ck_assert_double_eq(w.before.iteration, w.began[ITERATIONS - 2] - w.began[ITERATIONS - 3]);
    return w.before;
}
