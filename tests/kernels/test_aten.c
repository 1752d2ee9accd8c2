/* SPDX-License-Identifier: BSD-3-Clause */
/* test_aten.c: the operators of rules/aten.h round as a tensor of 16-bit numbers
 * would. Compiled for each of the two types; kernel_check compares rows that all
 * use these functions, and can't see it. */
#define OF_REAL_FLOAT
#include "suite.h"
#include <inttypes.h>
#include <stdlib.h>

#include "cpu/narrow.h"
#include "rules/aten.h"

#if defined(OF_DTYPE_BFLOAT16)
#define WIDEN of_bfloat16_widen
#define NARROW of_bfloat16_narrow
static const float just_above_one = 0x1.02p0f, third = 0x1.56p-2f;
#else
#define WIDEN of_float16_widen
#define NARROW of_float16_narrow
static const float just_above_one = 0x1.004p0f, third = 0x1.554p-2f;
#endif

static const of_form whole = {true, false}, tail = {true, true}, plain = {false, false};

static bool is_rounded(uint32_t bits) {
    const float x = of_float_of_bits(bits), ours = aten_round(x), stored = WIDEN(NARROW(x));
    if (x != x)
        return ours != ours;
    return of_bits_of_float(ours) == of_bits_of_float(stored);
}

TEST(rounding_is_that_of_memory) {
    /* Every sign, exponent and upper mantissa with lower bits around the ties. */
    static const uint32_t low[] = {0, 1, 0xfff, 0x1000, 0x1001, 0x1fff};
    for (uint32_t high = 0; high < 1u << 19; high++)
        for (size_t i = 0; i < sizeof low / sizeof *low; i++)
            if (!is_rounded(high << 13 | low[i]))
                ck_abort_msg("the float of bits %08" PRIx32 " is rounded wrongly",
                             high << 13 | low[i]);
}

TEST(numbers_that_are_in_memory_stay) {
    for (uint32_t stored = 0; stored < 1u << 16; stored++) {
        const float x = WIDEN((uint16_t)stored), ours = aten_round(x);
        if (x == x && of_bits_of_float(ours) != of_bits_of_float(x))
            ck_abort_msg("%04" PRIx32 " is rounded to %a", stored, (double)ours);
    }
}

TEST(add_rounds_its_factor_to_the_type_in_memory) {
    const double almost_one = 1.0 + 0.49 * ((double)just_above_one - 1.0);
    const float next = 1.5f + (just_above_one - 1.0f);
    ck_assert_float_eq(aten_add(whole, 0.0f, 1.5f, almost_one), 1.5f);
    ck_assert_float_eq(aten_mul_number(1.5f, almost_one), next); /* not so the others */
    ck_assert_float_eq(aten_addcmul(whole, 0.0f, 1.5f, 1.0f, almost_one), next);
    ck_assert_float_eq(aten_add_number(0.0f, 1.0 / 3), third);
}

TEST(add_rounds_the_product_too_in_the_tail_and_without_fma) {
    /* The square of 1 + 2u is 1 + 4u and a little: rounded by itself, nothing is
     * left when 1 + 4u is subtracted. */
    const float x = just_above_one, square = aten_round(x * x);
    const float rest = x * x - square;
    ck_assert_float_ne(rest, 0.0f);
#if defined(__aarch64__)
    ck_assert_float_eq(aten_add(whole, -square, x, (double)x), 0.0f);
#else
    ck_assert_float_eq(aten_add(whole, -square, x, (double)x), aten_round(rest));
#endif
    ck_assert_float_eq(aten_add(tail, -square, x, (double)x), 0.0f);
    ck_assert_float_eq(aten_add(plain, -square, x, (double)x), 0.0f);
}

TEST(lerp_ends_at_a_zero_whose_sign_the_tail_changes) {
    ck_assert(!signbit(aten_lerp(whole, -1.0f, -0.0f, 1.0)));
    ck_assert(signbit(aten_lerp(tail, -1.0f, -0.0f, 1.0)));
}

TEST(a_maximum_with_nan_is_nan_and_a_sign_of_nan_is_zero) {
    ck_assert(isnan(aten_maximum(NAN, 1.0f)) && isnan(aten_maximum(1.0f, NAN)));
    ck_assert_float_eq(aten_maximum(1.0f, 2.0f), 2.0f);
    ck_assert_float_eq(aten_sign(NAN), 0.0f);
    ck_assert_float_eq(aten_sign(-3.0f), -1.0f);
    ck_assert(isnan(aten_clamp(NAN, 0.0, 1.0)));
    ck_assert_float_eq(aten_clamp(2.0f, 0.0, 1.0 / 3), third);
}
