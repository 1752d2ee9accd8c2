/* SPDX-License-Identifier: BSD-3-Clause */
/* scale.c: one row of scale.h, compiled once per dtype and instruction set. The
 * build defines OF_DTYPE, OF_DTYPE_<NAME> and OF_ISA; and OF_PLAIN for the row
 * that takes one element at a time, with which the others are compared. */
#include <stdint.h>

#include "../scale.h"
#include "narrow_block.h"

#define OF_PASTE2(a, b) a##_##b
#define OF_PASTE(a, b) OF_PASTE2(a, b)
#define OF_SCALE OF_PASTE(of_scale, OF_PASTE(OF_DTYPE, OF_ISA))

of_scale_fn OF_SCALE;

#if defined(OF_DTYPE_FLOAT32) || defined(OF_DTYPE_FLOAT64)

#if defined(OF_DTYPE_FLOAT32)
typedef float of_stored;
#else
typedef double of_stored;
#endif

void OF_SCALE(void *to, const void *from, size_t n, const double factors[OF_MAX_FACTORS]) {
    const of_stored first = (of_stored)factors[0], second = (of_stored)factors[1];
    of_stored *out = to;
    const of_stored *in = from;
#if defined(__GNUC__) && !defined(__clang__) && !defined(OF_PLAIN)
#pragma GCC ivdep
#endif
    for (size_t i = 0; i < n; i++)
        out[i] = in[i] * first * second;
}

#else

#define WIDEN OF_PASTE(of, OF_PASTE(OF_DTYPE, widen))
#define NARROW OF_PASTE(of, OF_PASTE(OF_DTYPE, narrow))
#define WIDEN_BLOCK OF_PASTE(of, OF_PASTE(OF_DTYPE, widen_block))
#define NARROW_BLOCK OF_PASTE(of, OF_PASTE(OF_DTYPE, narrow_block))

static void scale_one(uint16_t *to, const uint16_t *from, float factor) {
    *to = NARROW(WIDEN(*from) * factor);
}

/* A block at a time. */
static void scale_block(uint16_t *to, const uint16_t *from, float factor) {
    float wide[OF_BLOCK];
    WIDEN_BLOCK(wide, from);
    for (int i = 0; i < OF_BLOCK; i++)
        wide[i] *= factor;
    NARROW_BLOCK(to, wide);
}

static void scale_all(uint16_t *to, const uint16_t *from, size_t n, float factor) {
    size_t at = 0;
#ifndef OF_PLAIN
    for (; at + OF_BLOCK <= n; at += OF_BLOCK)
        scale_block(to + at, from + at, factor);
#else
    (void)scale_block;
#endif
    for (; at < n; at++)
        scale_one(to + at, from + at, factor);
}

void OF_SCALE(void *to, const void *from, size_t n, const double factors[OF_MAX_FACTORS]) {
    scale_all(to, from, n, (float)factors[0]);
    if (factors[1] != 1.0)
        scale_all(to, to, n, (float)factors[1]);
}

#endif
