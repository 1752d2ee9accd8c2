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
/* Times every task from here on, or no more. What ran between two layers counts with the one
 * that came after. */
void of_reordering_time(of_reordering *reordering, bool on);
/* The k of reverse_first that of_reorder_best_k() finds with the mean times of the iterations
 * that were timed. OF_INVALID: none was. */
of_status of_reordering_best_k(of_reordering *reordering, const of_network *network,
                               bool await_first_use, uint64_t extra_bytes_allowed, size_t *k,
                               of_reorder_times *times);
/* From the next backward pass on the schedule is another one, without chosen layers. */
void of_reordering_choose(of_reordering *reordering, const of_reorder_choice *choice);
/* Bytes that waiting dW keep now, and the most since the creation. */
void of_reordering_held(of_reordering *reordering, uint64_t *now, uint64_t *most);

#ifdef __cplusplus
}
#endif
#endif
