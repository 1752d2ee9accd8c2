/* SPDX-License-Identifier: BSD-3-Clause */
/* reordering.h: one model's layers under a schedule of reorder.h, in training.
 *
 * The order and the sizes of the layers are those of the last forward pass. The plan is made
 * when they are asked for, or when backward begins, and again when they have changed. */
#ifndef OPTFUSE_PLANNERS_REORDER_REORDERING_H
#define OPTFUSE_PLANNERS_REORDER_REORDERING_H

#include "optfuse.h"
#include "planners/layer_user.h"
#include "planners/reorder/reorder.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct of_reordering of_reordering;

/* The known costs of a layer, in the order of the forward pass. */
typedef struct of_reordered {
    size_t layer;
    of_layer_work work; /* bytes of all uses together */
    uint32_t place;     /* see of_reorder_places() */
    bool fixed;         /* never waits, whatever the schedule says */
    bool recomputed;    /* seen inside backward only: never waits */
} of_reordered;

/* n layers. choice->held: by layer number; it and fixed (n, or NULL: none) are copied. The
 * caller owns one reference. */
of_status of_reordering_create(const of_reorder_choice *choice, const bool *fixed, size_t n,
                               of_reordering **out);
void of_reordering_retain(of_reordering *reordering);
void of_reordering_release(of_reordering *reordering);
/* From here on nothing waits any more. */
void of_reordering_stop(of_reordering *reordering);
/* The functions that the host calls. ctx is the reordering, with no reference of its own. */
of_layer_user of_reordering_user(of_reordering *reordering);

/* The layers that the last forward pass used, at most capacity rows; *n: how many there are.
 * *extra_bytes: of_reorder_extra_bytes(). rows may be NULL if capacity is 0. */
of_status of_reordering_plan(of_reordering *reordering, of_reordered *rows, size_t capacity,
                             size_t *n, uint64_t *extra_bytes);
/* In forward passes from here on every task is run for the sake of its time, or no more. */
void of_reordering_rehearse(of_reordering *reordering, bool on);

/* How many times as fast as stock's order the simulator has to find another one, above 1, before
 * it is taken: so far it may err. */
#define OF_REORDERING_WORTH 0.03

typedef struct of_reordering_best {
    size_t k;               /* of reverse_first; 0: stock's order */
    of_reorder_times times; /* with that k */
    of_reorder_times stock;
} of_reordering_best;

/* The k that of_reorder_best_k() finds with the times of the last forward pass, if it is worth
 * it. bytes_before: of parameters whose gradients come with the last dX, as an embedding's do. */
of_status of_reordering_best_k(of_reordering *reordering, const of_network *network,
                               bool await_first_use, uint64_t bytes_before,
                               uint64_t extra_bytes_allowed, of_reordering_best *best);
/* From the next backward pass on the schedule is another one, without chosen layers. */
void of_reordering_choose(of_reordering *reordering, const of_reorder_choice *choice);
/* Bytes that waiting dW keep now, and the most since the creation. */
void of_reordering_held(of_reordering *reordering, uint64_t *now, uint64_t *most);

#ifdef __cplusplus
}
#endif
#endif
