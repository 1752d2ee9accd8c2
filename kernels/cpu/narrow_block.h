/* SPDX-License-Identifier: BSD-3-Clause */
/* narrow_block.h: bfloat16 and float16 to float and back, a block at a time.
 * A block is one AVX-512 vector of floats or two AVX2 ones, so that it stays
 * in registers. The results are those of narrow.h. */
#ifndef OPTFUSE_CPU_NARROW_BLOCK_H
#define OPTFUSE_CPU_NARROW_BLOCK_H

#include "narrow.h"
#include "stored.h"

/* It takes a tenth of a second to read, and 16-bit types alone need it. */
#if defined(OF_IS_NARROW) && defined(__AVX2__)
#include <immintrin.h>
#endif

#define OF_BLOCK_FN static inline __attribute__((always_inline, unused))

/* The names for OF_DTYPE (stored.h). */
#define OF_WIDEN_BLOCK OF_PASTE(of, OF_PASTE(OF_DTYPE, widen_block))
#define OF_NARROW_BLOCK OF_PASTE(of, OF_PASTE(OF_DTYPE, narrow_block))

enum { OF_BLOCK = 16 };

#ifdef OF_IS_NARROW
#if defined(__AVX512F__)

/* For each of 16 floats, the number of the word in its upper half. */
#define OF_UPPER_WORDS                                                                             \
    _mm512_set_epi16(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 31, 29, 27, 25, 23, 21, 19,   \
                     17, 15, 13, 11, 9, 7, 5, 3, 1)
/* The word that belongs there. */
#define OF_NARROW_WORDS                                                                            \
    _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, \
                     4, 4, 3, 3, 2, 2, 1, 1, 0, 0)

OF_BLOCK_FN void of_bfloat16_widen_block(float *to, const uint16_t *from) {
    const __m512i words = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i *)from));
    const __m512i bits = _mm512_maskz_permutexvar_epi16(0xaaaaaaaau, OF_NARROW_WORDS, words);
    _mm512_storeu_ps(to, _mm512_castsi512_ps(bits));
}

OF_BLOCK_FN void of_bfloat16_narrow_block(uint16_t *to, const float *from) {
    const __m512 value = _mm512_loadu_ps(from);
    const __m512i bits = _mm512_castps_si512(value), nan = _mm512_set1_epi32(0x7fc00000);
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
    const __m512i half =
        _mm512_mask_mov_epi32(_mm512_set1_epi32(0x7fff), odd, _mm512_set1_epi32(0x8000));
    const __mmask16 numbers = _mm512_cmp_ps_mask(value, value, _CMP_ORD_Q);
    const __m512i rounded = _mm512_mask_add_epi32(nan, numbers, bits, half);
    const __m512i words = _mm512_permutexvar_epi16(OF_UPPER_WORDS, rounded);
    _mm256_storeu_si256((__m256i *)to, _mm512_castsi512_si256(words));
}

OF_BLOCK_FN void of_float16_widen_block(float *to, const uint16_t *from) {
    _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)));
}

OF_BLOCK_FN void of_float16_narrow_block(uint16_t *to, const float *from) {
    _mm256_storeu_si256((__m256i *)to,
                        _mm512_cvtps_ph(_mm512_loadu_ps(from), _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__AVX2__) && defined(__F16C__)

OF_BLOCK_FN void of_bfloat16_widen_block(float *to, const uint16_t *from) {
    for (int i = 0; i < OF_BLOCK; i += 8) {
        const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from + i)));
        _mm256_storeu_ps(to + i, _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)));
    }
}

OF_BLOCK_FN __m256i of_bfloat16_round(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}

OF_BLOCK_FN void of_bfloat16_narrow_block(uint16_t *to, const float *from) {
    const __m256i low = of_bfloat16_round(_mm256_loadu_ps(from));
    const __m256i high = of_bfloat16_round(_mm256_loadu_ps(from + 8));
    const __m256i packed = _mm256_packus_epi32(low, high); /* within halves: put in order */
    _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(packed, 0xd8));
}

OF_BLOCK_FN void of_float16_widen_block(float *to, const uint16_t *from) {
    for (int i = 0; i < OF_BLOCK; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
}

OF_BLOCK_FN void of_float16_narrow_block(uint16_t *to, const float *from) {
    for (int i = 0; i < OF_BLOCK; i += 8)
        _mm_storeu_si128((__m128i *)(to + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
}

#else

/* Not inlined: as functions of their own these loops are vectorized. */
#define OF_BLOCK_LOOPS(dtype)                                                                      \
    __attribute__((noinline, unused)) static void of_##dtype##_widen_block(                        \
        float *restrict to, const uint16_t *restrict from) {                                       \
        for (int i = 0; i < OF_BLOCK; i++)                                                         \
            to[i] = of_##dtype##_widen(from[i]);                                                   \
    }                                                                                              \
    __attribute__((noinline, unused)) static void of_##dtype##_narrow_block(                       \
        uint16_t *restrict to, const float *restrict from) {                                       \
        for (int i = 0; i < OF_BLOCK; i++)                                                         \
            to[i] = of_##dtype##_narrow(from[i]);                                                  \
    }
OF_BLOCK_LOOPS(bfloat16)
OF_BLOCK_LOOPS(float16)

#endif
#endif
#endif
