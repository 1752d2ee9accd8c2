/* SPDX-License-Identifier: BSD-3-Clause */
#include "moves.h"

#include <immintrin.h>

enum { LINE = 64 };

volatile int moves_mix;

__attribute__((target("avx512f"))) static void in_512_bits(const char *gradient, char *param,
                                                           char *const *state, size_t n_state,
                                                           size_t begin, size_t end,
                                                           bool past_caches) {
    const __m512i mask = _mm512_set1_epi32(moves_mix);
    for (size_t at = begin * LINE; at < end * LINE; at += LINE) {
        const __m512i x = _mm512_and_si512(_mm512_loadu_si512(gradient + at), mask);
        const __m512i kept = _mm512_xor_si512(_mm512_loadu_si512(param + at), x);
        if (past_caches)
            _mm512_stream_si512((void *)(param + at), kept);
        else
            _mm512_storeu_si512(param + at, kept);
        for (size_t k = 0; k < n_state; k++)
            _mm512_storeu_si512(state[k] + at,
                                _mm512_xor_si512(_mm512_loadu_si512(state[k] + at), x));
    }
}

__attribute__((target("avx2"))) static void in_256_bits(const char *gradient, char *param,
                                                        char *const *state, size_t n_state,
                                                        size_t begin, size_t end,
                                                        bool past_caches) {
    const __m256i mask = _mm256_set1_epi32(moves_mix);
    for (size_t at = begin * LINE; at < end * LINE; at += LINE / 2) {
        const __m256i gradients = _mm256_loadu_si256((const void *)(gradient + at));
        const __m256i x = _mm256_and_si256(gradients, mask);
        __m256i *const to = (void *)(param + at);
        const __m256i kept = _mm256_xor_si256(_mm256_loadu_si256(to), x);
        if (past_caches)
            _mm256_stream_si256(to, kept);
        else
            _mm256_storeu_si256(to, kept);
        for (size_t k = 0; k < n_state; k++) {
            __m256i *const at_state = (void *)(state[k] + at);
            _mm256_storeu_si256(at_state, _mm256_xor_si256(_mm256_loadu_si256(at_state), x));
        }
    }
}

void moves(const void *gradient, void *param, void *const *state, size_t n_state, size_t begin,
           size_t end, bool past_caches) {
    char *arrays[2] = {NULL};
    for (size_t k = 0; k < n_state && k < 2; k++)
        arrays[k] = state[k];
    (__builtin_cpu_supports("avx512f") ? in_512_bits : in_256_bits)(gradient, param, arrays,
                                                                    n_state, begin, end,
                                                                    past_caches);
    if (past_caches)
        _mm_sfence();
}
