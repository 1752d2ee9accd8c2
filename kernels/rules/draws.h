/* SPDX-License-Identifier: BSD-3-Clause */
/* draws.h: the random integers of stochastic rounding, and what a float32 becomes with one.
 *
 * An integer is a function of its key and of the element's place in the parameter's memory. So
 * neither the order of updates nor the number of threads nor the processor changes a bit, no
 * generator has a state, and a run that is resumed goes on as it would have.
 *
 * The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as
 * 1, 2, 3", SC 2011). Its counter is (block's low half, block's high half, step, parameter |
 * stream << 24), its key the seed. 16 blocks, the lanes, make a chunk of 64 words of 32 bits: those
 * of 128 elements of bfloat16, which take 16 bits each, or of 64 of float16, which take 32. Element r
 * of a chunk has lane r % 16. In vectors of lanes no integer has to move to another place:
 *
 *   bfloat16   word r / 32 of its lane, the low half if r / 16 is even
 *   float16    word r / 16 of its lane
 *
 * tests/kernels/test_draws.c has the known answers. C11, and CUDA C++. */
#ifndef OPTFUSE_RULES_DRAWS_H
#define OPTFUSE_RULES_DRAWS_H

#include <stdint.h>
#include <string.h>

#include "real.h"

enum { OF_DRAW_LANES = 16, OF_DRAW_WORDS = 4, OF_DRAW_ROUNDS = 10, OF_DRAW_STREAM_BIT = 24 };
#define OF_PHILOX_A 0xD2511F53u
#define OF_PHILOX_B 0xCD9E8D57u
#define OF_PHILOX_KEY0 0x9E3779B9u
#define OF_PHILOX_KEY1 0xBB67AE85u

/* The key of an integer, beside its element. */
typedef struct of_draw_key {
    uint64_t seed;
    uint32_t step;
    uint32_t parameter; /* its number in the optimizer, and the stream in the highest 8 bits */
} of_draw_key;

OF_RULE_FN of_draw_key of_key_of_stream(uint64_t seed, uint32_t step, uint32_t parameter,
                                        uint32_t stream) {
    const of_draw_key key = {seed, step, parameter | stream << OF_DRAW_STREAM_BIT};
    return key;
}

/* The four words of a counter, in its place. */
OF_RULE_FN void of_philox(uint32_t *counter, uint64_t key) {
    uint32_t key0 = (uint32_t)key, key1 = (uint32_t)(key >> 32);
    for (int round = 0; round < OF_DRAW_ROUNDS; round++) {
        const uint64_t a = (uint64_t)counter[0] * OF_PHILOX_A;
        const uint64_t b = (uint64_t)counter[2] * OF_PHILOX_B;
        counter[0] = (uint32_t)(b >> 32) ^ counter[1] ^ key0;
        counter[1] = (uint32_t)b;
        counter[2] = (uint32_t)(a >> 32) ^ counter[3] ^ key1;
        counter[3] = (uint32_t)a;
        key0 += OF_PHILOX_KEY0;
        key1 += OF_PHILOX_KEY1;
    }
}

/* A chunk has 2 to this elements, of which so many share a word. */
OF_RULE_FN uint32_t of_draw_shift(uint32_t halves) {
    return 5 + halves;
}

/* The words of a lane's block. */
OF_RULE_FN void of_draw_lane(uint32_t *words, uint64_t block, of_draw_key key) {
    words[0] = (uint32_t)block;
    words[1] = (uint32_t)(block >> 32);
    words[2] = key.step;
    words[3] = key.parameter;
    of_philox(words, key.seed);
}

OF_RULE_FN uint32_t of_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Away from zero with the probability of what is cut off. NaN stays, whatever its bits, and so do
 * infinities and the signs of zeros. */
OF_RULE_FN uint16_t of_bfloat16_stochastic(float x, uint32_t draw) {
    const uint32_t bits = of_bits(x);
    return (uint16_t)(((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits + draw) >> 16);
}

/* The same from 2^-14 on, by the 13 highest bits of the integer. Below, where the next numbers lie
 * 2^-24 apart, by all of its bits: what is cut off counts in 2^-32 of that distance. By masks, signed
 * comparisons and conversions of small numbers: compilers vectorize these everywhere. */
OF_RULE_FN uint16_t of_float16_stochastic(float x, uint32_t draw) {
    const uint32_t bits = of_bits(x);
    const int32_t rest = (int32_t)(bits & 0x7fffffffu);
    const uint32_t is_small = 0u - (uint32_t)(rest < 0x38800000);
    const uint32_t is_nan = 0u - (uint32_t)(rest > 0x7f800000);

    const int32_t finite = rest < 0x47800000 ? rest : 0x47800000;
    const int32_t moved = finite + (int32_t)(draw >> 19);
    const int32_t usual = (moved < 0x47800000 ? moved : 0x47800000) - 0x38000000;

    const uint32_t below = (uint32_t)rest & is_small;
    float units;
    memcpy(&units, &below, sizeof units);
    units *= 0x1p24f;
    const int32_t whole = (int32_t)units;
    const float cut = (units - (float)whole) * 0x1p16f;
    const int32_t high = (int32_t)cut, low = (int32_t)((cut - (float)high) * 0x1p16f);
    /* The carry of the sum of two numbers of 32 bits. */
    const uint32_t sum = ((uint32_t)low + (draw & 0xffffu)) >> 16;
    const uint32_t small = (uint32_t)whole + (((uint32_t)high + (draw >> 16) + sum) >> 16);

    const uint32_t number = (small & is_small) | ((uint32_t)usual >> 13 & ~is_small);
    return (uint16_t)((bits >> 16 & 0x8000u) | (0x7e00u & is_nan) | (number & ~is_nan));
}

/* Those of an instance's dtype, and the elements of a chunk: of a lane, and of all. */
#if defined(OF_DTYPE_BFLOAT16)
enum { OF_HALVES = 2 };
#define OF_STOCHASTIC of_bfloat16_stochastic
#else
enum { OF_HALVES = 1 };
#define OF_STOCHASTIC of_float16_stochastic
#endif
enum { OF_ROWS = (int)OF_DRAW_WORDS * (int)OF_HALVES, OF_CHUNK = OF_ROWS * (int)OF_DRAW_LANES };

#endif
