/* SPDX-License-Identifier: BSD-3-Clause */
/* arrays.h: the arrays of one update, between guard pages. */
#ifndef OPTFUSE_TEST_ARRAYS_H
#define OPTFUSE_TEST_ARRAYS_H

#include <stdint.h>

#include "kernels.h"

enum { N_ARRAYS = 2 + OF_MAX_STATE }; /* parameter, gradient, states */

/* Pages with an unreadable page before and after them. */
typedef struct guarded {
    unsigned char *pages;
    size_t bytes;
} guarded;

guarded guarded_create(size_t bytes); /* exits if there is no memory */
void guarded_destroy(guarded *area);

/* The arrays of one update: array i holds n elements somewhere in areas[i],
 * or is NULL if absent. Around them lies a known pattern. */
typedef struct arrays {
    of_dtype dtype;
    /* The states are bfloat16, or float32; set before they are placed. */
    bool mixed, wide;
    size_t n;
    guarded areas[N_ARRAYS];
    unsigned char *at[N_ARRAYS];
    size_t placed[N_ARRAYS]; /* bytes at `at` that are not the pattern */
} arrays;

/* That of array i. */
of_dtype arrays_dtype(const arrays *a, int i);
void arrays_create(arrays *a, size_t most_bytes);
void arrays_destroy(arrays *a);

/* Places arrays of n elements at random, often touching a guard page. Bit i of
 * state_used says whether state i is present. What was written beside them before stays: after a
 * failed arrays_intact() they fail again. */
void arrays_place(arrays *a, of_dtype dtype, size_t n, unsigned state_used, uint64_t *random);
/* Places them at multiples of `alignment`, near the guard page at the end;
 * often one of them is an element off. */
void arrays_place_aligned(arrays *a, of_dtype dtype, size_t n, unsigned state_used,
                          size_t alignment, uint64_t *random);
/* Fills them with random numbers, a few of them special. */
void arrays_fill(arrays *a, uint64_t *random);
void arrays_copy(arrays *to, const arrays *from);
of_span arrays_span(const arrays *a, size_t tail);

/* Number of elements that differ; NaN equals NaN, -0 differs from +0.
 * *array and *element say where the first one is. */
size_t arrays_differ(const arrays *a, const arrays *b, int *array, size_t *element);
/* Whether the pattern around every array is untouched. */
bool arrays_intact(const arrays *a);

/* An element as a number, and whether two are the same, as above. */
void arrays_put(unsigned char *to, of_dtype dtype, double value);
double arrays_get(const unsigned char *from, of_dtype dtype);
bool arrays_same(const unsigned char *x, const unsigned char *y, of_dtype dtype);

uint64_t random_next(uint64_t *state); /* never 0 as a seed */
double random_real(uint64_t *state);   /* in [0, 1) */

#endif
