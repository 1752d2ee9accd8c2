/* SPDX-License-Identifier: BSD-3-Clause */
/* sums.c: of_sum_fn of norm.h for one element type and instruction set; the build defines OF_DTYPE,
 * OF_DTYPE_<NAME> and OF_ISA.
 *
 * PyTorch adds magnitudes, and the squares of float16, one after the other. Other squares of whole
 * vectors are added in lanes, the lanes in order, and then the rest. 16-bit numbers are computed
 * with in float, where the square of a float16 is exact. */
#include <math.h>
#include <string.h>

#include "../norm.h"
#include "cell.h"
#include "narrow_array.h"
#include "stored.h"

#define OF_SUMS OF_PASTE(of_sums, OF_PASTE(OF_DTYPE, OF_ISA))
#define OF_INLINE static inline __attribute__((always_inline))

of_sum_fn OF_SUMS;

/* A vector of PyTorch's has 32 bytes of elements, and lanes are 32 bytes of sums. BLOCK elements of
 * TOGETHER arrays are added at a time: each addition waits for the one before it. */
enum {
    VECTOR = 32 / sizeof(of_stored),
    LANES = 32 / sizeof(of_real),
    BLOCK = 64,
    TOGETHER = 4
};
typedef of_real lanes __attribute__((vector_size(32), aligned(sizeof(of_real)), may_alias));

typedef enum way { MAGNITUDES, SQUARES, SQUARES_IN_LANES } way;

/* An array that is being summed. */
typedef struct chain {
    of_sum *of;
    const of_stored *next;
    size_t left; /* elements, without the rest behind whole vectors */
    of_real sum;
    lanes sums;
} chain;

#ifdef OF_IS_NARROW
OF_INLINE const of_real *numbers_of(of_real room[BLOCK], const of_stored *from, size_t n) {
    (void)narrow; /* nothing is written */
    widen(room, from, n);
    return room;
}
#else
OF_INLINE const of_real *numbers_of(of_real room[BLOCK], const of_stored *from, size_t n) {
    (void)room, (void)n;
    return from;
}
#endif

OF_INLINE void add_block(chain c[], size_t together, size_t n, way how) {
    of_real room[TOGETHER][BLOCK];
    const of_real *x[TOGETHER];
    for (size_t k = 0; k < together; k++)
        x[k] = numbers_of(room[k], c[k].next, n);
    if (how == SQUARES_IN_LANES)
        for (size_t i = 0; i < n; i += LANES)
            for (size_t k = 0; k < together; k++) {
                const lanes some = *(const lanes *)(const void *)(x[k] + i);
                c[k].sums = c[k].sums + some * some;
            }
    else
        for (size_t i = 0; i < n; i++)
            for (size_t k = 0; k < together; k++)
                c[k].sum += how == SQUARES ? x[k][i] * x[k][i] : of_absolute(x[k][i]);
}

OF_INLINE void add_blocks(chain c[], size_t together, size_t n, way how) {
    chain now[TOGETHER]; /* in registers */
    for (size_t k = 0; k < together; k++)
        now[k] = c[k];
    for (size_t block; n != 0; n -= block) {
        block = n < BLOCK ? n : BLOCK;
        add_block(now, together, block, how);
        for (size_t k = 0; k < together; k++) {
            now[k].next += block;
            now[k].left -= block;
        }
    }
    for (size_t k = 0; k < together; k++)
        c[k] = now[k];
}

/* As many elements of each as the shortest has, of four arrays or of the first one. */
OF_INLINE void add(chain c[TOGETHER], size_t n, way how) {
    size_t elements = c[0].left;
    for (size_t k = 1; n == TOGETHER && k < TOGETHER; k++)
        elements = c[k].left < elements ? c[k].left : elements;
    if (n == TOGETHER)
        add_blocks(c, TOGETHER, elements, how);
    else
        add_blocks(c, 1, elements, how);
}

/* The lanes and the rest; so many squares of that at a time are rounded, the others are not. */
static of_real lanes_and_rest(const chain *c, size_t rounded_by) {
    const size_t whole = c->of->n / VECTOR * VECTOR, n = c->of->n - whole;
    const size_t rounded = rounded_by ? n / rounded_by * rounded_by : 0;
    of_real sum = c->sums[0];
    for (size_t i = 1; i < LANES; i++)
        sum += c->sums[i];
    of_real room[BLOCK];
    const of_real *x = numbers_of(room, (const of_stored *)c->of->numbers + whole, n);
    for (size_t i = 0; i < n; i++)
        sum = i < rounded ? sum + x[i] * x[i] : of_multiply_add(true, x[i], x[i], sum);
    return sum;
}

static void begin(chain *c, of_sum *of, way how) {
    const size_t n = how == SQUARES_IN_LANES ? of->n / VECTOR * VECTOR : of->n;
    *c = (chain){.of = of, .next = of->numbers, .left = n};
}

static void finish(const chain *c, way how, size_t rounded_by) {
    c->of->sum = (double)(how == SQUARES_IN_LANES ? lanes_and_rest(c, rounded_by) : c->sum);
}

/* Lets go of the chains that are over. Returns how many go on. */
static size_t finish_some(chain c[TOGETHER], size_t n, way how, size_t rounded_by) {
    size_t kept = 0;
    for (size_t i = 0; i < n; i++)
        if (c[i].left == 0)
            finish(&c[i], how, rounded_by);
        else
            c[kept++] = c[i];
    return kept;
}

OF_INLINE void sum_all(of_sum *const sums[], size_t n, way how, size_t rounded_by) {
    chain c[TOGETHER];
    size_t under_way = 0, next = 0;
    while (next < n || under_way > 0) {
        while (under_way < TOGETHER && next < n)
            begin(&c[under_way++], sums[next++], how);
        add(c, under_way, how);
        under_way = finish_some(c, under_way, how, rounded_by);
    }
}

void OF_SUMS(of_sum *const sums[], size_t n, of_terms terms, size_t rounded_by) {
    if (terms == OF_MAGNITUDES)
        sum_all(sums, n, MAGNITUDES, 0);
    else
#ifdef OF_DTYPE_FLOAT16
        sum_all(sums, n, SQUARES, rounded_by);
#else
        sum_all(sums, n, SQUARES_IN_LANES, rounded_by);
#endif
}
