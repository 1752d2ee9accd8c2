/* SPDX-License-Identifier: BSD-3-Clause */
/* aten_cuda.h: PyTorch's CUDA operators on one element: what aten.h is for the CPU,
 * with the same names, so that one rule is written for both. They are those of its
 * multi-tensor functions (torch._foreach_*), which its optimizers use on GPUs unless
 * they are told not to. docs/numerics.md says where each formula is from.
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

#endif
