/* SPDX-License-Identifier: BSD-3-Clause */
/* scale.c: one row of scale.h, compiled once per dtype and instruction set. The
 * build defines OF_DTYPE, OF_DTYPE_<NAME> and OF_ISA; and OF_PLAIN for the row
 * that takes one element at a time, with which the others are compared. */
#include "../scale.h"
#include "cell.h"
#include "narrow_block.h"
#include "stored.h"

#define OF_SCALE OF_PASTE(of_scale, OF_PASTE(OF_DTYPE, OF_ISA))

of_scale_fn OF_SCALE;

#ifndef OF_IS_NARROW

void OF_SCALE(void *to, const void *from, size_t n, const double factors[OF_MAX_FACTORS]) {
    const of_stored first = (of_stored)factors[0], second = (of_stored)factors[1];
    of_stored *out = to;
    const of_stored *in = from;
    OF_NO_ALIAS
    for (size_t i = 0; i < n; i++)
        out[i] = in[i] * first * second;
}

#elif defined(OF_CONVERTS_IN_LOOPS) && !defined(OF_PLAIN)

void OF_SCALE(void *to, const void *from, size_t n, const double factors[OF_MAX_FACTORS]) {
    const float first = (float)factors[0], second = (float)factors[1];
    of_stored *out = to;
    const of_stored *in = from;
    OF_NO_ALIAS
    for (size_t i = 0; i < n; i++)
        out[i] = of_put(of_multiplied(of_get(in[i]), first) * second);
}

#else

#define WIDEN OF_PASTE(of, OF_PASTE(OF_DTYPE, widen))
#define NARROW OF_PASTE(of, OF_PASTE(OF_DTYPE, narrow))

static void scale_one(uint16_t *to, const uint16_t *from, float factor) {
    *to = NARROW(WIDEN(*from) * factor);
}

/* A block at a time. */
static void scale_block(uint16_t *to, const uint16_t *from, float factor) {
    float wide[OF_BLOCK];
    OF_WIDEN_BLOCK(wide, from);
    for (int i = 0; i < OF_BLOCK; i++)
        wide[i] *= factor;
    OF_NARROW_BLOCK(to, wide);
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
