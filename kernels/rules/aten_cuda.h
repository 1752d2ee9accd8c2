/* SPDX-License-Identifier: BSD-3-Clause */
/* aten_cuda.h: PyTorch's CUDA operators on one element: what aten.h is for the CPU,
 * with the same names, so that one rule is written for both. They are those of its
 * multi-tensor functions (torch._foreach_*), which its optimizers use on GPUs unless
 * they are told not to; below, for programs, those that are others on one tensor.
 * The formulas are those of ForeachFunctors.cuh, DeviceAddCmulCdiv.cuh and Lerp.h.
 *
 * PyTorch compiles them with contraction on. None of them has two products in one
 * sum, so there is one way only to fuse each. Numbers are rounded to the type of
 * the computation and no further. */
#ifndef OPTFUSE_RULES_ATEN_CUDA_H
#define OPTFUSE_RULES_ATEN_CUDA_H

#include "aten_common.h"

/* self.add(other, alpha). form: the CPU's affair, here and below. */
OF_RULE_FN of_real aten_add(of_form form, of_real self, of_real other, double alpha) {
    (void)form;
    return aten_round(of_multiply_add(true, other, (of_real)alpha, self));
}

OF_RULE_FN of_real aten_add_number(of_real self, double number) {
    return aten_round(self + (of_real)number);
}

/* A value of 1 is looked for when the operator runs. */
OF_RULE_FN of_real aten_addcmul(of_form form, of_real self, of_real a, of_real b, double value) {
    const of_real factor = (of_real)value;
    (void)form;
    if (factor == (of_real)1)
        return aten_round(of_multiply_add(true, a, b, self));
    return aten_round(of_multiply_add(true, factor, a * b, self));
}

OF_RULE_FN of_real aten_addcdiv(of_real self, of_real a, of_real b, double value) {
    const of_real factor = (of_real)value, quotient = a / b;
    if (factor == (of_real)1)
        return aten_round(self + quotient);
    return aten_round(of_multiply_add(true, factor, quotient, self));
}

OF_RULE_FN of_real aten_lerp(of_form form, of_real self, of_real end, double weight) {
    const of_real w = (of_real)weight, way = end - self;
    (void)form;
    if (of_absolute(w) < (of_real)0.5)
        return aten_round(of_multiply_add(true, w, way, self));
    return aten_round(of_multiply_add(true, -way, (of_real)1 - w, end));
}

OF_RULE_FN of_real aten_larger_of_lists(of_form form, of_real a, of_real b) {
    (void)form;
    return aten_maximum(a, b);
}

OF_RULE_FN of_real aten_smaller_of_lists(of_form form, of_real a, of_real b) {
    (void)form;
    return a != a || a < b ? a : b;
}

/* The functions below are operators on one tensor. */

/* NaN if one of them is. By the chip's own instruction: of two zeros that with the sign of
 * the result that is asked for. */
OF_RULE_FN of_real aten_larger(of_form form, of_real a, of_real b) {
    const of_real larger = a == b ? (signbit(a) ? b : a) : (a > b ? a : b);
    (void)form;
    return a != a ? a : b != b ? b : larger;
}

OF_RULE_FN of_real aten_smaller(of_form form, of_real a, of_real b) {
    const of_real smaller = a == b ? (signbit(a) ? a : b) : (a < b ? a : b);
    (void)form;
    return a != a ? a : b != b ? b : smaller;
}

OF_RULE_FN of_real aten_between(of_form form, of_real x, of_real low, of_real high) {
    const of_real raised = x < low ? low : x, result = high < raised ? high : raised;
    (void)form;
    return x != x ? x : low != low ? low : high != high ? high : result;
}

/* A number that takes a tensor's place in add(). */
OF_RULE_FN of_real aten_number(double number) {
    return (of_real)number;
}

/* By the divisor's reciprocal (of_gpu_numbers()): the last bit may differ from a quotient's. */
OF_RULE_FN of_real aten_divide(of_real self, double reciprocal) {
    return aten_mul(self, (of_real)reciprocal);
}

/* By the chip's approximation, which a CPU does not have. */
OF_RULE_FN of_real aten_rsqrt(of_form form, of_real x) {
    (void)form;
#ifdef __CUDA_ARCH__
    return aten_round(::rsqrt(x));
#else
    return aten_round((of_real)1 / of_square_root(x));
#endif
}

#endif
