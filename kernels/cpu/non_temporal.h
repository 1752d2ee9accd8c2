/* SPDX-License-Identifier: BSD-3-Clause */
/* non_temporal.h: stores that go past the caches. A line that another core has, too,
 * need not be taken from it first (docs/performance.md). AArch64 has a hint only, which
 * compilers give no loop that they vectorize: nothing goes past the caches there. */
#ifndef OPTFUSE_CPU_NON_TEMPORAL_H
#define OPTFUSE_CPU_NON_TEMPORAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../kernels.h"

#if defined(__SSE2__)
#include <emmintrin.h> /* those of AVX are in immintrin.h, which takes ten times as long to read */
#endif

#define OF_STORE_FN static inline __attribute__((always_inline, unused))

#if defined(__clang__)
#define OF_STREAM(bits, to, value) __builtin_nontemporal_store(value, to)
#else
#define OF_STREAM(bits, to, value) __builtin_ia32_movntdq##bits(to, value)
#endif

/* By one vector, from wherever it is. */
#define OF_STREAM_VECTOR(bits, to, from)                                                           \
    do {                                                                                           \
        typedef long long vector __attribute__((vector_size(bits / 8)));                           \
        typedef vector anywhere __attribute__((aligned(1), may_alias));                            \
        const vector value = *(const anywhere *)(const void *)(from);                              \
        OF_STREAM(bits, (vector *)(void *)(to), value);                                            \
    } while (0)

OF_STORE_FN bool of_goes_past_caches(const of_span *span) {
#if defined(__SSE2__)
    return span->past_caches && (uintptr_t)span->param % OF_CACHE_LINE == 0;
#else
    (void)span;
    return false;
#endif
}

/* 32 bytes, or whole cache lines; `to` is aligned as if it began with as many. */
OF_STORE_FN void of_store_past_caches(void *to, const void *from, size_t bytes) {
    char *out = to;
    const char *in = from;
#if defined(__AVX512F__)
    for (; bytes >= 64; bytes -= 64, out += 64, in += 64)
        OF_STREAM_VECTOR(512, out, in);
#endif
#if defined(__AVX__)
    for (; bytes >= 32; bytes -= 32, out += 32, in += 32)
        OF_STREAM_VECTOR(256, out, in);
#elif defined(__SSE2__)
    for (; bytes >= 16; bytes -= 16, out += 16, in += 16)
        _mm_stream_si128((void *)out, _mm_loadu_si128((const void *)in));
#else
    memcpy(out, in, bytes);
#endif
}

/* A thread that is told of these stores after this sees them. */
OF_STORE_FN void of_end_stores_past_caches(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

#endif
