/* SPDX-License-Identifier: BSD-3-Clause */
/* rounded_block.h: a block of floats to bfloat16 or float16, stochastically (rules/draws.h). */
#ifndef OPTFUSE_CPU_ROUNDED_BLOCK_H
#define OPTFUSE_CPU_ROUNDED_BLOCK_H

#include "draw_chunk.h"
#include "narrow_block.h"

#ifdef OF_IS_NARROW

/* A row of a chunk's draws is that of a block. */
_Static_assert((int)OF_BLOCK == (int)OF_DRAW_LANES, "a row of draws is a block");

#if defined(OF_DTYPE_BFLOAT16) && defined(__AVX512F__)

OF_BLOCK_FN void of_round_block(uint16_t *to, const float *from, const of_words words, int row) {
    const __m512 value = _mm512_loadu_ps(from);
    const __m512i half = _mm512_loadu_si512(words[row / 2]);
    const __m512i draw = row % 2 ? _mm512_srli_epi32(half, 16)
                                 : _mm512_and_si512(half, _mm512_set1_epi32(0xffff));
    const __mmask16 numbers = _mm512_cmp_ps_mask(value, value, _CMP_ORD_Q);
    const __m512i rounded = _mm512_mask_add_epi32(_mm512_set1_epi32(0x7fc00000), numbers,
                                                  _mm512_castps_si512(value), draw);
    const __m512i in_place = _mm512_srli_epi32(rounded, 16);
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16(in_place));
}

#elif defined(OF_DTYPE_BFLOAT16) && defined(__AVX2__)

OF_BLOCK_FN __m256i of_round_half(const float *from, const uint32_t *words, int row) {
    const __m256 value = _mm256_loadu_ps(from);
    const __m256i half = _mm256_loadu_si256((const __m256i *)words);
    const __m256i draw = row % 2 ? _mm256_srli_epi32(half, 16)
                                 : _mm256_and_si256(half, _mm256_set1_epi32(0xffff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_castps_si256(value), draw), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}

OF_BLOCK_FN void of_round_block(uint16_t *to, const float *from, const of_words words, int row) {
    const __m256i low = of_round_half(from, words[row / 2], row);
    const __m256i high = of_round_half(from + 8, words[row / 2] + 8, row);
    const __m256i packed = _mm256_packus_epi32(low, high); /* within halves: put in order */
    _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(packed, 0xd8));
}

#else

/* Not inlined: as a function of its own this loop is vectorized. */
__attribute__((noinline, unused)) static void of_round_block(uint16_t *restrict to,
                                                             const float *restrict from,
                                                             const of_words words, int row) {
    const uint32_t *restrict word = words[row / OF_HALVES];
    const int shift = row % OF_HALVES * 16;
    for (int i = 0; i < OF_BLOCK; i++)
        to[i] = OF_STOCHASTIC(from[i], word[i] >> shift & (OF_HALVES == 2 ? 0xffffu : 0xffffffffu));
}

#endif
#endif
#endif
