/* SPDX-License-Identifier: BSD-3-Clause */
/* op_by_op_numbers.h: a block of a parameter as op_by_op_loop.c computes with it. */
#ifndef OPTFUSE_CPU_OP_BY_OP_NUMBERS_H
#define OPTFUSE_CPU_OP_BY_OP_NUMBERS_H

#include "narrow_array.h"
#include "non_temporal.h"
#include "op_by_op_instance.h"

/* Two roots of float64 take 8 KiB, five arrays of float 10 KiB. */
enum { OF_OP_BY_OP_BLOCK = 512 };

/* Where a block's numbers are while they are computed with: for 16-bit types in
 * the room, else in memory, but for a gradient that has to change and a parameter
 * that is then stored past the caches. */
typedef struct of_numbers {
    of_real *param, *state[OF_N_STATE];
    const of_real *grad;
    size_t n; /* in the room: filled up to whole vectors */
} of_numbers;

typedef struct of_room {
    _Alignas(64) of_real grad[OF_OP_BY_OP_BLOCK];
    _Alignas(64) of_real param[OF_OP_BY_OP_BLOCK];
    of_real roots[OF_ROOM * OF_OP_BY_OP_BLOCK];
#ifdef OF_IS_NARROW
    of_real state[OF_N_STATE][OF_OP_BY_OP_BLOCK];
#endif
} of_room;

/* A block of the parameter. Its start is aligned, its end only where others follow. */
static void store_past_caches(of_stored *to, const of_stored *from, size_t n) {
    const size_t bytes = n * sizeof *to, lines = bytes / OF_CACHE_LINE * OF_CACHE_LINE;
    of_store_past_caches(to, from, lines);
    memcpy((char *)to + lines, (const char *)from + lines, bytes - lines);
}

#ifdef OF_IS_NARROW

__attribute__((noinline)) static of_numbers load(const of_span *span, unsigned used, size_t at,
                                                 size_t n, of_room *room) {
    of_numbers x = {
        room->param, {NULL}, room->grad, (n + OF_WIDENED - 1) / OF_WIDENED * OF_WIDENED};
    widen(room->param, (const of_stored *)span->param + at, n);
    widen(room->grad, (const of_stored *)span->grad + at, n);
    for (unsigned i = 0; i < OF_N_STATE; i++) {
        if (used & (1u << i)) {
            x.state[i] = room->state[i];
            widen(x.state[i], (const of_stored *)span->state[i] + at, n);
        }
    }
    return x;
}

__attribute__((noinline)) static void save(const of_span *span, unsigned used, size_t at, size_t n,
                                           const of_numbers *x) {
    of_stored param[OF_OP_BY_OP_BLOCK];
    if (of_goes_past_caches(span)) {
        narrow(param, x->param, n);
        store_past_caches((of_stored *)span->param + at, param, n);
    } else {
        narrow((of_stored *)span->param + at, x->param, n);
    }
    for (unsigned i = 0; i < OF_N_STATE; i++)
        if (used & (1u << i))
            narrow((of_stored *)span->state[i] + at, x->state[i], n);
}

/* Tells the compiler that nothing is left after whole vectors. */
OF_RULE_FN size_t count(const of_numbers *x) {
    return x->n / OF_WIDENED * OF_WIDENED;
}

#else

OF_RULE_FN of_numbers load(const of_span *span, unsigned used, size_t at, size_t n, of_room *room) {
    of_numbers x = {(of_real *)span->param + at, {NULL}, (const of_real *)span->grad + at, n};
    if (of_goes_past_caches(span))
        x.param = memcpy(room->param, x.param, n * sizeof *x.param);
    for (unsigned i = 0; i < OF_N_STATE; i++)
        if (used & (1u << i))
            x.state[i] = (of_real *)span->state[i] + at;
    return x;
}

/* The others were computed in place. */
OF_RULE_FN void save(const of_span *span, unsigned used, size_t at, size_t n, const of_numbers *x) {
    (void)used;
    if (of_goes_past_caches(span))
        store_past_caches((of_stored *)span->param + at, x->param, n);
}

OF_RULE_FN size_t count(const of_numbers *x) {
    return x->n;
}

#endif

#endif
