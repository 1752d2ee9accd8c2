/* SPDX-License-Identifier: BSD-3-Clause */
/* narrow_array.h: arrays of bfloat16 or float16 to float and back. */
#ifndef OPTFUSE_CPU_NARROW_ARRAY_H
#define OPTFUSE_CPU_NARROW_ARRAY_H

#include "stored.h"

#include "cell.h"
#include "narrow_block.h"

#ifdef OF_CONVERTS_IN_LOOPS

enum { OF_WIDENED = 1 };

static void widen(of_real *restrict to, const of_stored *restrict from, size_t n) {
    OF_NO_ALIAS
    for (size_t i = 0; i < n; i++)
        to[i] = of_get(from[i]);
}

static void narrow(of_stored *restrict to, const of_real *restrict from, size_t n) {
    OF_NO_ALIAS
    for (size_t i = 0; i < n; i++)
        to[i] = of_put(from[i]);
}

#elif defined(OF_IS_NARROW)

/* Widened arrays are filled up to a multiple of this. */
enum { OF_WIDENED = OF_BLOCK };

/* The rest after whole vectors is widened with zeros behind it. */
static void widen(of_real *to, const of_stored *from, size_t n) {
    of_stored rest[OF_BLOCK] = {0};
    size_t at = 0;
    for (; at + OF_BLOCK <= n; at += OF_BLOCK)
        OF_WIDEN_BLOCK(to + at, from + at);
    if (at < n) {
        memcpy(rest, from + at, (n - at) * sizeof *rest);
        OF_WIDEN_BLOCK(to + at, rest);
    }
}

static void narrow(of_stored *to, const of_real *from, size_t n) {
    of_stored rest[OF_BLOCK];
    size_t at = 0;
    for (; at + OF_BLOCK <= n; at += OF_BLOCK)
        OF_NARROW_BLOCK(to + at, from + at);
    if (at < n) {
        OF_NARROW_BLOCK(rest, from + at);
        memcpy(to + at, rest, (n - at) * sizeof *rest);
    }
}

#endif

#endif
