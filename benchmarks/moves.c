/* SPDX-License-Identifier: BSD-3-Clause */
/* moves.c: the bytes of an update and nothing else. */
#include <emmintrin.h>
#include <stdbool.h>
#include <stddef.h>

/* A mask: the gradient's bits under it are XORed into what is written. 0 in a benchmark; the
 * compiler does not know that. A test sets other bits to prove that every byte moves. */
__attribute__((visibility("default"))) volatile int moves_mix;

/* A cache line. */
typedef int line __attribute__((vector_size(64), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE void store(line *to, line value, bool past_caches) {
    if (!past_caches)
        *to = value;
    for (int i = 0; past_caches && i < 4; i++)
        _mm_stream_si128((__m128i *)(void *)to + i,
                         _mm_loadu_si128((const __m128i *)(const void *)&value + i));
}

INLINE void some_lines(const line *gradient, line *param, line *const *state, const size_t n_state,
                       size_t begin, size_t end, const bool past_caches) {
    const line mask = (line){0} + moves_mix;
    line *const first = state[0], *const second = state[1];
    for (size_t i = begin; i < end; i++) {
        const line x = gradient[i] & mask;
        store(&param[i], param[i] ^ x, past_caches);
        if (n_state > 0)
            first[i] ^= x;
        if (n_state > 1)
            second[i] ^= x;
    }
}

void moves(const line *gradient, line *param, line *const *state, size_t n_state, size_t begin,
           size_t end, bool past_caches);

/* Reads cache lines [begin, end) of the gradient, the parameter and n_state (0 to 2) arrays, and
 * writes the parameter and the arrays back unchanged, with the widest vectors of this CPU.
 * past_caches: the parameter's stores bypass the caches, as those of the kernels may. The
 * parameter starts on a cache line. The calls have constants, so that their loops don't branch. */
__attribute__((target_clones("avx512f", "avx2", "default"))) void
moves(const line *gradient, line *param, line *const *state, size_t n_state, size_t begin,
      size_t end, bool past_caches) {
#define CASE(n, past)                                                                              \
    if (n_state == n && past_caches == past)                                                       \
    some_lines(gradient, param, state, n, begin, end, past)
    CASE(0, false);
    CASE(1, false);
    CASE(2, false);
    CASE(0, true);
    CASE(1, true);
    CASE(2, true);
    if (past_caches)
        _mm_sfence();
}
