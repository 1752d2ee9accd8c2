/* SPDX-License-Identifier: BSD-3-Clause */
/* adagrad_foreach.h: Adagrad as PyTorch's multi-tensor implementation has it, its
 * default on GPUs: operator by operator, where the CPU has a fused kernel. */
#ifndef OPTFUSE_RULES_ADAGRAD_FOREACH_H
#define OPTFUSE_RULES_ADAGRAD_FOREACH_H

#include "adagrad.h"

typedef struct adagrad_foreach_scalars {
    op_by_op_scalars common;
    double rate, eps;
} adagrad_foreach_scalars;

static inline void adagrad_foreach_prepare(const double *hyper, of_count *count, void *scalars) {
    adagrad_foreach_scalars *s = (adagrad_foreach_scalars *)scalars;
    const double slower = 1.0 + (count->step - 1.0) * hyper[adagrad_lr_decay];
    s->common = op_by_op_prepare(hyper[adagrad_weight_decay], hyper[adagrad_maximize], 0);
    s->rate = -hyper[adagrad_lr] / slower;
    s->eps = hyper[adagrad_eps];
}

OF_RULE_FN void adagrad_foreach_radicand(const adagrad_foreach_scalars *s, unsigned variant,
                                         of_form form, of_element *e, of_real *root) {
    of_real *sum = &e->state[adagrad_sum];
    (void)s, (void)variant;
    *sum = aten_addcmul(form, *sum, e->grad, e->grad, 1.0);
    root[0] = *sum;
}

OF_RULE_FN void adagrad_foreach_element(const adagrad_foreach_scalars *s, unsigned variant,
                                        of_form form, of_element *e, const of_real *root) {
    const of_real deviation = aten_add_number(root[0], s->eps);
    (void)variant, (void)form;
    e->param = aten_addcdiv(e->param, aten_mul_number(e->grad, s->rate), deviation, 1.0);
}

#endif
