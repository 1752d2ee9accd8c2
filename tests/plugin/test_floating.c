/* SPDX-License-Identifier: BSD-3-Clause */
/* How a thread computes is taken over by another and given back. */
#include "suite.h"
#include <fenv.h>
#include <float.h>
#include <stdbool.h>
#include <stdlib.h>

#include "floating.h"

#if defined(__aarch64__)
enum { FLUSH = 1 << 24 };
#else
enum { FLUSH = 0x8000 };
#endif

/* Not by the compiler, and not before or after the setting is changed. */
static float quotient(float x, float y) {
    volatile float number = x;
    volatile float result = number / y;
    return result;
}

TEST(rounding_is_taken_over_and_given_back) {
    const float third = quotient(1, 3);
    ck_assert_int_eq(fesetround(FE_UPWARD), 0);
    const unsigned upward = of_floating_now();
    const float larger = quotient(-1, 3);
    fesetround(FE_TONEAREST);
    const unsigned outside = of_floating_now();
    ck_assert_uint_ne(upward, outside);
    ck_assert(larger > -third);
    of_floating_set(upward);
    const float again = quotient(-1, 3);
    of_floating_set(outside);
    ck_assert(again == larger);
    ck_assert(quotient(-1, 3) == -third);
}

TEST(denormals_are_flushed_where_they_were) {
    const unsigned outside = of_floating_now();
    of_floating_set(outside | FLUSH);
    const unsigned flushing = of_floating_now();
    const bool flushed = quotient(FLT_MIN, 2) == 0.0f;
    of_floating_set(outside);
    ck_assert(flushed);
    ck_assert(quotient(FLT_MIN, 2) > 0.0f);
    ck_assert_uint_eq(flushing, outside | FLUSH);
}

TEST(what_else_the_register_holds_stays) {
    feclearexcept(FE_ALL_EXCEPT);
    feraiseexcept(FE_DIVBYZERO);
    of_floating_set(of_floating_now() | FLUSH);
    of_floating_set(of_floating_now() & ~(unsigned)FLUSH);
    ck_assert_int_eq(fetestexcept(FE_DIVBYZERO), FE_DIVBYZERO);
}
