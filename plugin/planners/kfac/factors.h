/* SPDX-License-Identifier: BSD-3-Clause */
/* factors.h: what the layers of one model contribute to their Kronecker factors between two
 * steps, and when the sums are sent to the other processes.
 *
 * A slot is one factor: a packed symmetric matrix of raw sums at a place of the host's buffer,
 * and how many rows went into them. Slots are arranged in an order and in groups of neighbours;
 * a group is one message. Messages start in their order, whoever is ready first: so every process
 * calls the same collectives in the same order. A group starts as soon as each of its slots has
 * been used as often as in the collection before; what comes for it later goes into a second
 * buffer, which is sent at the end (arXiv 2107.06533).
 *
 * Any thread may contribute. One at a time does, and launches. */
#ifndef OPTFUSE_PLANNERS_KFAC_FACTORS_H
#define OPTFUSE_PLANNERS_KFAC_FACTORS_H

#include "optfuse.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct of_factors of_factors;

/* Called under a lock; they must not call back. */
typedef struct of_factors_host {
    uint32_t struct_size; /* sizeof(of_factors_host) */
    void *ctx;
    /* Adds a contribution, of which only the host knows what it is, to the sums that begin at
     * this element of the buffer, or of the second one. false: it failed. */
    bool (*add)(void *ctx, const void *contribution, size_t offset, bool late);
    /* Begins to sum up n elements of the buffer over the processes, and does not wait for them.
     * false: it failed. */
    bool (*reduce)(void *ctx, size_t offset, size_t n);
} of_factors_host;

typedef struct of_factor_slot {
    size_t offset;  /* elements from the beginning of the buffer */
    uint64_t uses;  /* contributions */
    double rows;    /* of them all */
    double seconds; /* when the last one came, as given to of_factors_add() */
    bool late;      /* some are in the second buffer */
} of_factor_slot;

/* Slots of so many elements each, in the order of the array, each a group of its own. The host is
 * copied. The caller owns the result. OF_INVALID: no slots or no elements. OF_NO_MEMORY. */
of_status of_factors_create(const size_t *elements, size_t n, const of_factors_host *host,
                            of_factors **out);
/* Nobody may use it any more. NULL does nothing. */
void of_factors_destroy(of_factors *factors);

/* order: each slot once; group: of the first, second, ... in that order, numbers that begin with
 * 0 and grow by at most 1. Both n, copied. OF_INVALID: they are not so, or a collection runs.
 * OF_NO_MEMORY. */
of_status of_factors_arrange(of_factors *factors, const uint32_t *order, const uint32_t *group);

/* Begins a collection, without contributions: the host has cleared its buffers, and none runs.
 * Returns its number, which is not 0. */
uint64_t of_factors_begin(of_factors *factors);
/* The number of the collection that runs, or 0. */
uint64_t of_factors_collection(const of_factors *factors);
/* One contribution, of `rows` rows, at a time on the caller's clock. What belongs to another
 * collection than the one that runs is ignored. OF_REFUSED: the host failed. */
of_status of_factors_add(of_factors *factors, size_t slot, uint64_t collection, double rows,
                         double seconds, const void *contribution);
/* Sends the groups that are left and ends the collection, if one runs; of_factors_slots() tells of
 * it until the next one begins. One whose sums nobody wants ends so, too: others wait for its
 * messages. OF_REFUSED: the host failed, and the messages that follow were not sent. */
of_status of_factors_end(of_factors *factors);
/* Room for n. */
void of_factors_slots(of_factors *factors, of_factor_slot *out);
/* How many messages were sent in the collection. */
size_t of_factors_sent(of_factors *factors);

#ifdef __cplusplus
}
#endif
#endif
