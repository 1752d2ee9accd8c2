/* SPDX-License-Identifier: BSD-3-Clause */
/* The integers of stochastic rounding: the generator's known answers, where each element's is, and
 * what a number becomes with one. */
#define OF_REAL_FLOAT
#define OF_DTYPE_BFLOAT16
#include "suite.h"
#include <math.h>
#include <string.h>

#include "cpu/draw_chunk.h"
#include "cpu/narrow.h"

/* Those of Random123 (kat_vectors): counter, key, words. */
static const struct {
    uint32_t counter[4];
    uint64_t key;
    uint32_t words[4];
} known[] = {
    {{0, 0, 0, 0}, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     0xffffffffffffffff,
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     0x299f31d0a4093822,
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

TESTS(the_generator_has_its_known_answers, LENGTH(known)) {
    uint32_t words[4];
    memcpy(words, known[row].counter, sizeof words);
    of_philox(words, known[row].key);
    for (int i = 0; i < 4; i++)
        ck_assert_uint_eq(words[i], known[row].words[i]);
}

static const of_draw_key some_key = {0x123456789abcdef0, 77, 5 | 2u << OF_DRAW_STREAM_BIT};

/* The integer of one element by the definition. halves: how many elements share a word. */
static uint32_t draw(uint64_t element, uint32_t halves) {
    const uint32_t place = (uint32_t)(element % (64 * halves)), row = place / 16;
    const uint64_t block = element / (64 * halves) * 16 + place % 16;
    uint32_t words[4] = {(uint32_t)block, (uint32_t)(block >> 32), some_key.step,
                         some_key.parameter};
    of_philox(words, some_key.seed);
    return halves == 1 ? words[row] : words[row / 2] >> (row % 2 * 16) & 0xffff;
}

/* A chunk's are made side by side. */
TEST(a_chunk_has_the_integers_of_its_elements) {
    static const uint64_t chunks[] = {0, 1, 12345, (UINT64_C(1) << 28) - 1, UINT64_C(1) << 28};
    for (size_t c = 0; c < LENGTH(chunks); c++) {
        of_words words;
        of_draw_chunk(words, chunks[c], &some_key);
        for (uint32_t r = 0; r < 128; r++)
            ck_assert_uint_eq(draw(chunks[c] * 128 + r, 2),
                              words[r / 32][r % 16] >> (r / 16 % 2 * 16) & 0xffff);
        for (uint32_t r = 0; r < 64; r++)
            ck_assert_uint_eq(draw(chunks[c] * 64 + r, 1), words[r / 16][r % 16]);
    }
}

/* The first lane of the first chunk is the generator's block 0, whatever vectors compute. */
TEST(the_first_lane_is_the_known_answer) {
    const of_draw_key zero = of_key_of_stream(0, 0, 0, 0);
    of_words words;
    of_draw_chunk(words, 0, &zero);
    for (int word = 0; word < 4; word++)
        ck_assert_uint_eq(words[word][0], known[0].words[word]);
}

/* Floats, and what they become with the smallest and the largest integer. */
static const struct {
    float x;
    uint16_t bfloat16[2], float16[2];
} edges[] = {
    {0.0f, {0, 0}, {0, 0}},
    {-0.0f, {0x8000, 0x8000}, {0x8000, 0x8000}},
    {1.0f, {0x3f80, 0x3f80}, {0x3c00, 0x3c00}},
    {-1.5f, {0xbfc0, 0xbfc0}, {0xbe00, 0xbe00}},
    {0x1.000002p0f, {0x3f80, 0x3f80}, {0x3c00, 0x3c00}},
    {-0x1.fffffep0f, {0xbfff, 0xc000}, {0xbfff, 0xc000}},
    {INFINITY, {0x7f80, 0x7f80}, {0x7c00, 0x7c00}},
    {-INFINITY, {0xff80, 0xff80}, {0xfc00, 0xfc00}},
    {65504.0f, {0x477f, 0x4780}, {0x7bff, 0x7bff}},
    {65535.0f, {0x477f, 0x4780}, {0x7bff, 0x7c00}},
    {65536.0f, {0x4780, 0x4780}, {0x7c00, 0x7c00}},
    {0x1p-14f, {0x3880, 0x3880}, {0x0400, 0x0400}},
    {0x1p-15f, {0x3800, 0x3800}, {0x0200, 0x0200}},
    {-0x1.8p-24f, {0xb3c0, 0xb3c0}, {0x8001, 0x8002}},
    {0x1p-25f, {0x3300, 0x3300}, {0, 1}},
    {0x1.fffffep-15f, {0x387f, 0x3880}, {0x03ff, 0x0400}},
};

TESTS(edges_are_kept, LENGTH(edges)) {
    for (int most = 0; most < 2; most++) {
        const uint32_t draw = most ? 0xffffffffu : 0;
        ck_assert_uint_eq(of_bfloat16_stochastic(edges[row].x, draw & 0xffff),
                          edges[row].x == 0x1.000002p0f && most ? 0x3f81 : edges[row].bfloat16[most]);
        ck_assert_uint_eq(of_float16_stochastic(edges[row].x, draw),
                          edges[row].x == 0x1.000002p0f && most ? 0x3c01 : edges[row].float16[most]);
    }
}

TEST(nan_stays_whatever_its_bits) {
    static const uint32_t nans[] = {0x7fc00000, 0xffc00000, 0x7f800001, 0x7fffffff, 0xffffffff};
    static const uint32_t draws[] = {0, 1, 0xffff, 0xffffffff};
    for (size_t i = 0; i < LENGTH(nans); i++)
        for (size_t k = 0; k < LENGTH(draws); k++) {
            const float x = of_float_of_bits(nans[i]);
            ck_assert(isnan(of_bfloat16_widen(of_bfloat16_stochastic(x, draws[k] & 0xffff))));
            ck_assert(isnan(of_float16_widen(of_float16_stochastic(x, draws[k]))));
        }
}

/* The number of integers, of `all` evenly spaced ones, with which x goes away from zero. */
static int ups(uint16_t round_one(float, uint32_t), float x, uint32_t all, uint32_t apart) {
    const uint16_t down = round_one(x, 0);
    int n = 0;
    for (uint32_t i = 0; i < all; i++)
        n += round_one(x, i * apart) != down;
    return n;
}

static uint16_t bfloat16_of(float x, uint32_t draw) {
    return of_bfloat16_stochastic(x, draw);
}

static uint16_t float16_of(float x, uint32_t draw) {
    return of_float16_stochastic(x, draw);
}

/* Each at a quarter of the distance between its neighbours. */
TEST(the_probability_is_what_is_cut_off) {
    ck_assert_int_eq(ups(bfloat16_of, 1 + 0x1p-9f, 1 << 16, 1), 1 << 14);
    ck_assert_int_eq(ups(bfloat16_of, -1 - 0x1p-9f, 1 << 16, 1), 1 << 14);
    ck_assert_int_eq(ups(float16_of, 1 + 0x1p-12f, 1 << 16, 1 << 16), 1 << 14);
    ck_assert_int_eq(ups(float16_of, 5.25f * 0x1p-24f, 1 << 16, 1 << 16), 1 << 14);
    ck_assert_int_eq(ups(float16_of, -0x1p-26f, 1 << 16, 1 << 16), 1 << 14);
    ck_assert_int_eq(ups(float16_of, 0x1p-40f, 1 << 16, 1), 0);
    ck_assert_uint_eq(of_float16_stochastic(0x1p-40f, 0xffff0000u), 1);
    ck_assert_uint_eq(of_float16_stochastic(0x1p-40f, 0xfffeffffu), 0);
    ck_assert_uint_eq(of_float16_stochastic(0x1p-60f, 0xffffffffu), 0);
}
