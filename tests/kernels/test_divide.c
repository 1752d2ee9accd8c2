/* SPDX-License-Identifier: BSD-3-Clause */
/* A division by a known number must be the CPU's own division, bit for bit. */
#include "suite.h"
#include <float.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../sample.h"
#include "rules/real.h"

#ifdef OF_REAL_FLOAT
typedef uint32_t of_bits;
enum { SIGNIFICAND = 23 };
#define LEAST FLT_TRUE_MIN
#define MOST FLT_MAX
#else
typedef uint64_t of_bits;
enum { SIGNIFICAND = 52 };
#define LEAST DBL_TRUE_MIN
#define MOST DBL_MAX
#endif

enum { NUMBERS = 1 << 24, DIVISORS = DRAWN(200) };

static of_real from_bits(of_bits bits) {
    of_real x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint64_t state = 1;

static uint64_t random_bits(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 11 | state << 53;
}

__attribute__((constructor)) static void needs_fma(void) {
    if (!__builtin_cpu_supports("fma"))
        exit(77); /* skipped */
}

/* From 1 to 4, one after the other or, where there are too many, at random. */
static of_real numerator(uint64_t i) {
    const of_bits one = (of_bits)(SIGNIFICAND == 23 ? 0x7f : 0x3ff) << SIGNIFICAND;
    const of_bits two_binades = ((of_bits)2 << SIGNIFICAND) - 1;
    return from_bits(one + ((of_bits)(SIGNIFICAND == 23 ? i : random_bits()) & two_binades));
}

/* Square roots of bias corrections, and the significands at both ends. */
static of_real divisor(int i) {
    static const double betas[] = {0.9, 0.95, 0.98, 0.99, 0.999, 0.9999, 0.9999999};
    if (i == 0)
        return (of_real)1 - (SIGNIFICAND == 23 ? FLT_EPSILON : (of_real)DBL_EPSILON) / 2;
    if (i == 1)
        return (of_real)0.5 + (SIGNIFICAND == 23 ? FLT_EPSILON : (of_real)DBL_EPSILON) / 2;
    if (i == 2)
        return (of_real)1e-8;
    if (i < DIVISORS / 2)
        return (of_real)sqrt(1 - pow(betas[i % 7], i));
    return numerator(random_bits()) / 4;
}

/* How many of the quotients are not the CPU's. */
static long differing(of_real by, bool corrected) {
    const of_real reciprocal = (of_real)1 / by;
    long count = 0;
    for (uint64_t i = 0; i < (SIGNIFICAND == 23 ? NUMBERS : NUMBERS / 16); i++) {
        const of_real x = numerator(i);
        const of_real q = corrected ? of_divide_known(x, by, reciprocal) : x * reciprocal;
        count += q != x / by;
    }
    return count;
}

TEST(every_quotient_is_that_of_a_division) {
    long without = 0;
    for (int i = 0; i < DIVISORS; i++) {
        const of_real by = divisor(i);
        ck_assert_msg(differing(by, true) == 0, "wrong quotients by %a", (double)by);
        if (i < 10)
            without += differing(by, false);
    }
    ck_assert_msg(without > NUMBERS / 16, "the product alone is as good: nothing is tested");
}

TEST(the_ends_of_the_range_and_what_is_no_number) {
    const of_real ends[] = {0, of_square_root(LEAST), of_square_root(MOST), (of_real)INFINITY,
                            (of_real)NAN};
    for (int i = 0; i < DIVISORS; i++) {
        const of_real by = i ? divisor(i) : 0;
        for (size_t k = 0; k < sizeof ends / sizeof *ends; k++) {
            const of_real q = of_divide_known(ends[k], by, (of_real)1 / by);
            const of_real right = ends[k] / by;
            ck_assert_msg(q == right || (q != q && right != right), "%a / %a is %a",
                          (double)ends[k], (double)by, (double)q);
        }
    }
}
