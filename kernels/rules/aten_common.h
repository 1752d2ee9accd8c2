/* SPDX-License-Identifier: BSD-3-Clause */
/* aten_common.h: what PyTorch's operators on the CPU and on CUDA have in common:
 * results are rounded to the type the tensor has in memory, as between two
 * operators, and these operators have one formula on both. */
#ifndef OPTFUSE_RULES_ATEN_COMMON_H
#define OPTFUSE_RULES_ATEN_COMMON_H

#include <stdint.h>
#include <string.h>

#include "real.h"

#if defined(OF_DTYPE_BFLOAT16) || defined(OF_DTYPE_FLOAT16)
enum { ATEN_IS_NARROW = 1 };

OF_RULE_FN uint32_t aten_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

OF_RULE_FN float aten_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The bits that make a number NaN, if these are those of one. */
OF_RULE_FN uint32_t aten_nan(uint32_t bits) {
    return (int32_t)(bits & 0x7fffffffu) > 0x7f800000 ? 0x7fc00000u : 0u;
}
#else
enum { ATEN_IS_NARROW = 0 };
#endif

/* To the type in memory and back. On a CPU without branches and 16-bit numbers, so
 * that the compiler vectorizes it everywhere. */
#if defined(__CUDACC__) && (defined(OF_DTYPE_BFLOAT16) || defined(OF_DTYPE_FLOAT16))

OF_RULE_FN of_real aten_round(of_real x); /* by the chip: cuda/element.cuh */

#elif defined(OF_DTYPE_BFLOAT16)

OF_RULE_FN of_real aten_round(of_real x) {
    const uint32_t bits = aten_bits(x);
    const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    return aten_float((rounded & 0xffff0000u) | aten_nan(bits));
}

#elif defined(OF_DTYPE_FLOAT16)

/* Adding 2^13 times the power of two below x leaves the ten bits of a float16
 * mantissa; adding 0.5 leaves those of a denormal one. From 65536 on it is
 * infinity. (Signed numbers, because SSE2 compares no others.) */
OF_RULE_FN of_real aten_round(of_real x) {
    const uint32_t bits = aten_bits(x);
    const int32_t rest = (int32_t)(bits & 0x7fffffffu);
    const int32_t small = rest < 0x47800000 ? rest : 0x47800000;
    const int32_t power = (small & 0x7f800000) + (13 << 23);
    const float shift = aten_float((uint32_t)(power > 0x3f000000 ? power : 0x3f000000));
    const uint32_t kept = aten_bits((aten_float((uint32_t)small) + shift) - shift);
    const uint32_t infinite = (int32_t)kept >= 0x47800000 ? 0x7f800000u : 0u;
    return aten_float((bits & 0x80000000u) | kept | infinite | aten_nan(bits));
}

#else

OF_RULE_FN of_real aten_round(of_real x) {
    return x;
}

#endif

OF_RULE_FN of_real aten_mul(of_real self, of_real other) {
    return aten_round(self * other);
}

OF_RULE_FN of_real aten_mul_number(of_real self, double number) {
    return aten_mul(self, (of_real)number);
}

OF_RULE_FN of_real aten_div(of_real self, of_real other) {
    return aten_round(self / other);
}

OF_RULE_FN of_real aten_div_number(of_real self, double number) {
    return aten_div(self, (of_real)number);
}

/* NaN if one of them is. */
OF_RULE_FN of_real aten_maximum(of_real a, of_real b) {
    const of_real larger = a > b ? a : b;
    return a != a ? a : larger;
}

/* 0 for NaN. */
OF_RULE_FN of_real aten_sign(of_real x) {
    return (of_real)(x > (of_real)0) - (of_real)(x < (of_real)0);
}

/* NaN stays. */
OF_RULE_FN of_real aten_at_least(of_real x, of_real least) {
    return x < least ? least : x;
}

OF_RULE_FN of_real aten_at_most(of_real x, of_real most) {
    return x > most ? most : x;
}

OF_RULE_FN of_real aten_clamp(of_real x, double low, double high) {
    return aten_at_most(aten_at_least(x, aten_round((of_real)low)), aten_round((of_real)high));
}

#endif
