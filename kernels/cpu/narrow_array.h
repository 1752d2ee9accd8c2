/* SPDX-License-Identifier: BSD-3-Clause */
/* narrow_array.h: arrays of bfloat16 or float16 to float and back. */
#ifndef OPTFUSE_CPU_NARROW_ARRAY_H
#define OPTFUSE_CPU_NARROW_ARRAY_H

#include "stored.h"

#include "../rules/real.h"
#include "narrow_block.h"

#ifdef OF_IS_NARROW

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
