/* SPDX-License-Identifier: BSD-3-Clause */
/* aten.h: PyTorch's CPU operators on one element, for the rules whose reference
 * is a sequence of them. Each result is rounded to the type the tensor has in
 * memory, as it would be between two operators. Each formula was found by
 * comparing bits with PyTorch's operator.
 *
 * Square roots are missing: for float and double they come from a library
 * (of_span.square_roots), a block at a time. */
#ifndef OPTFUSE_RULES_ATEN_H
#define OPTFUSE_RULES_ATEN_H

#include "aten_common.h"

/* The numbers an operator takes are double, as in Python, and are rounded as the
 * operator does it: to the type of the computation, and to the type in memory
 * by add and clamp. They are the same for all elements: the compiler takes the
 * rounding out of the loop. */

/* Whether a result within an operator is rounded to a type of 16 bits. The scalar code does so, and
 * all code on CPUs without an FMA unit and on AArch64. */
OF_RULE_FN bool aten_rounds_within(of_form form) {
#if defined(__aarch64__)
    (void)form;
    return true;
#else
    return form.tail || !form.fused;
#endif
}

/* self.add(other, alpha). The product is such a result. */
OF_RULE_FN of_real aten_add(of_form form, of_real self, of_real other, double alpha) {
    const of_real factor = aten_round((of_real)alpha);
    if (ATEN_IS_NARROW && aten_rounds_within(form))
        return aten_round(self + aten_round(other * factor));
    return aten_round(of_multiply_add(of_fuses_spelled(form), other, factor, self));
}

OF_RULE_FN of_real aten_add_number(of_real self, double number) {
    return aten_round(self + aten_round((of_real)number));
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
    return aten_round(
        of_multiply_add(of_fuses_spelled(form), coefficient, end - self, near ? self : end));
}

/* maximum, and a limit that is a tensor: of equal numbers (zeros) the vector code gives the
 * second one, the scalar code the first. NaN if one of them is. */
OF_RULE_FN of_real aten_larger(of_form form, of_real a, of_real b) {
    const of_real larger = form.tail ? (a < b ? b : a) : (a > b ? a : b);
    return a != a ? a : b != b ? b : larger;
}

OF_RULE_FN of_real aten_smaller(of_form form, of_real a, of_real b) {
    const of_real smaller = form.tail ? (b < a ? b : a) : (a < b ? a : b);
    return a != a ? a : b != b ? b : smaller;
}

OF_RULE_FN of_real aten_between(of_form form, of_real x, of_real low, of_real high) {
    return aten_smaller(form, aten_larger(form, x, low), high);
}

/* Functions on lists call the operator on one tensor after the other. */
OF_RULE_FN of_real aten_larger_of_lists(of_form form, of_real a, of_real b) {
    return aten_larger(form, a, b);
}

OF_RULE_FN of_real aten_smaller_of_lists(of_form form, of_real a, of_real b) {
    return aten_smaller(form, a, b);
}

/* A number that takes a tensor's place in add(). */
OF_RULE_FN of_real aten_number(double number) {
    return aten_round((of_real)number);
}

OF_RULE_FN of_real aten_divide(of_real self, double number) {
    return aten_div_number(self, number);
}

/* The root is a result within. */
OF_RULE_FN of_real aten_rsqrt(of_form form, of_real x) {
    const of_real root = of_square_root(x);
    return aten_round((of_real)1 / (aten_rounds_within(form) ? aten_round(root) : root));
}

#endif
