/* SPDX-License-Identifier: BSD-3-Clause */
/* draw_chunk.h: the words of a chunk of draws (rules/draws.h), by vectors. Products of 32 bits come
 * from lanes of 64, of which the high halves may hold anything: so even and odd blocks are apart
 * until they are done. */
#ifndef OPTFUSE_CPU_DRAW_CHUNK_H
#define OPTFUSE_CPU_DRAW_CHUNK_H

#include "../rules/draws.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

typedef uint32_t of_words[OF_DRAW_WORDS][OF_DRAW_LANES];

#if defined(__AVX512F__)

typedef __m512i of_lanes;
#define OF_LANES_OF(x) _mm512_set1_epi64((long long)(x))
#define OF_LANES_ADD(a, b) _mm512_add_epi64(a, b)
#define OF_LANES_MULTIPLY(a, b) _mm512_mul_epu32(a, b)
#define OF_LANES_HIGH(a) _mm512_srli_epi64(a, 32)
#define OF_LANES_XOR(a, b, c) _mm512_ternarylogic_epi64(a, b, c, 0x96)
#define OF_EVEN_NUMBERS _mm512_setr_epi64(0, 2, 4, 6, 8, 10, 12, 14)
#define OF_LANES_JOIN(even, odd) _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32))

#elif defined(__AVX2__)

typedef __m256i of_lanes;
#define OF_LANES_OF(x) _mm256_set1_epi64x((long long)(x))
#define OF_LANES_ADD(a, b) _mm256_add_epi64(a, b)
#define OF_LANES_MULTIPLY(a, b) _mm256_mul_epu32(a, b)
#define OF_LANES_HIGH(a) _mm256_srli_epi64(a, 32)
#define OF_LANES_XOR(a, b, c) _mm256_xor_si256(_mm256_xor_si256(a, b), c)
#define OF_EVEN_NUMBERS _mm256_setr_epi64x(0, 2, 4, 6)
#define OF_LANES_JOIN(even, odd) _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa)

#endif

#ifdef OF_EVEN_NUMBERS

enum { OF_IN_PAIR = sizeof(of_lanes) / sizeof(uint32_t) }; /* lanes of a vector and its odd one */

/* A round of the blocks in x, which are its four words. */
OF_RULE_FN void of_philox_round(of_lanes *x, of_lanes key0, of_lanes key1) {
    const of_lanes a = OF_LANES_MULTIPLY(x[0], OF_LANES_OF(OF_PHILOX_A));
    const of_lanes b = OF_LANES_MULTIPLY(x[2], OF_LANES_OF(OF_PHILOX_B));
    x[0] = OF_LANES_XOR(OF_LANES_HIGH(b), x[1], key0);
    x[1] = b;
    x[2] = OF_LANES_XOR(OF_LANES_HIGH(a), x[3], key1);
    x[3] = a;
}

/* Lanes from `first` on, as many as a pair of vectors has. */
OF_RULE_FN void of_draw_pair(of_words words, int first, uint64_t block, const of_draw_key *key) {
    uint32_t key0 = (uint32_t)key->seed, key1 = (uint32_t)(key->seed >> 32);
    const of_lanes begin = OF_LANES_OF((uint32_t)block + (uint32_t)first);
    of_lanes even[OF_DRAW_WORDS] = {OF_LANES_ADD(begin, OF_EVEN_NUMBERS), OF_LANES_OF(block >> 32),
                                    OF_LANES_OF(key->step), OF_LANES_OF(key->parameter)};
    of_lanes odd[OF_DRAW_WORDS];
    memcpy(odd, even, sizeof odd);
    odd[0] = OF_LANES_ADD(even[0], OF_LANES_OF(1));
#pragma GCC unroll 10
    for (int round = 0; round < OF_DRAW_ROUNDS; round++) {
        of_philox_round(even, OF_LANES_OF(key0), OF_LANES_OF(key1));
        of_philox_round(odd, OF_LANES_OF(key0), OF_LANES_OF(key1));
        key0 += OF_PHILOX_KEY0;
        key1 += OF_PHILOX_KEY1;
    }
    for (int word = 0; word < OF_DRAW_WORDS; word++) {
        const of_lanes joined = OF_LANES_JOIN(even[word], odd[word]);
        memcpy(&words[word][first], &joined, sizeof joined);
    }
}

OF_RULE_FN void of_draw_chunk(of_words words, uint64_t chunk, const of_draw_key *key) {
    for (int first = 0; first < OF_DRAW_LANES; first += OF_IN_PAIR)
        of_draw_pair(words, first, chunk * OF_DRAW_LANES, key);
}

#else

OF_RULE_FN void of_draw_chunk(of_words words, uint64_t chunk, const of_draw_key *key) {
    for (uint32_t lane = 0; lane < OF_DRAW_LANES; lane++) {
        uint32_t of_lane[OF_DRAW_WORDS];
        of_draw_lane(of_lane, chunk * OF_DRAW_LANES + lane, *key);
        for (int word = 0; word < OF_DRAW_WORDS; word++)
            words[word][lane] = of_lane[word];
    }
}

#endif
#endif
