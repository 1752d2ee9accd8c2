/* SPDX-License-Identifier: BSD-3-Clause */
/* aten.h: PyTorch's CPU operators on one element, for the rules whose reference
 * is a chain of them. Each result is rounded to the type the tensor has in
 * memory, as it would be between two operators. docs/numerics.md says how each
 * formula was established.
 *
 * Square roots are missing: for float and double they come from a library
 * (of_span.square_roots), a block at a time. */
#ifndef OPTFUSE_RULES_ATEN_H
#define OPTFUSE_RULES_ATEN_H

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

/* To the type in memory and back. Without branches and 16-bit numbers, so that
 * the compiler vectorizes it everywhere. */
#if defined(OF_DTYPE_BFLOAT16)

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

/* The numbers an operator takes are double, as in Python, and are rounded as the
 * operator does it: to the type of the computation, and to the type in memory
 * by add and clamp. They are the same for all elements: the compiler takes the
 * rounding out of the loop. */

/* self.add(other, alpha). For a type of 16 bits the scalar code rounds the
 * product to it too, and so does all code on CPUs without an FMA unit. */
OF_RULE_FN of_real aten_add(of_form form, of_real self, of_real other, double alpha) {
    const of_real factor = aten_round((of_real)alpha);
    if (ATEN_IS_NARROW && (form.tail || !form.fused))
        return aten_round(self + aten_round(other * factor));
    return aten_round(of_multiply_add(form.fused, other, factor, self));
}

OF_RULE_FN of_real aten_add_number(of_real self, double number) {
    return aten_round(self + aten_round((of_real)number));
}

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

OF_RULE_FN of_real aten_addcmul(of_form form, of_real self, of_real a, of_real b, double value) {
    return aten_round(of_multiply_add(form.fused, (of_real)value * a, b, self));
}

OF_RULE_FN of_real aten_addcdiv(of_real self, of_real a, of_real b, double value) {
    return aten_round(self + (of_real)value * a / b);
}

/* The scalar code has a zero of the other sign as coefficient when weight is 1. */
OF_RULE_FN of_real aten_lerp(of_form form, of_real self, of_real end, double weight) {
    const of_real w = (of_real)weight;
    const bool near = of_absolute(w) < (of_real)0.5;
    const of_real rest = form.tail ? -((of_real)1 - w) : w - (of_real)1;
    const of_real coefficient = near ? w : rest;
    return aten_round(of_multiply_add(form.fused, coefficient, end - self, near ? self : end));
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
OF_RULE_FN of_real aten_clamp(of_real x, double low, double high) {
    const of_real least = aten_round((of_real)low), most = aten_round((of_real)high);
    const of_real above = x < least ? least : x;
    return above > most ? most : above;
}

#endif
