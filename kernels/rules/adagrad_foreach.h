/* SPDX-License-Identifier: BSD-3-Clause */
/* adagrad_foreach.h: Adagrad as PyTorch's multi-tensor implementation has it, its
 * default on GPUs: a chain of operators, where the CPU has a fused kernel. */
#ifndef OPTFUSE_RULES_ADAGRAD_FOREACH_H
#define OPTFUSE_RULES_ADAGRAD_FOREACH_H

#include "adagrad.h"

typedef struct adagrad_foreach_scalars {
    chain_scalars chain;
    double rate, eps;
} adagrad_foreach_scalars;

OF_RULE_FN unsigned adagrad_foreach_variant_state(unsigned variant) {
    (void)variant;
    return 1u;
}

static inline void adagrad_foreach_prepare(const double *hyper, of_count *count, void *scalars) {
    adagrad_foreach_scalars *s = (adagrad_foreach_scalars *)scalars;
    const double slower = 1.0 + (count->step - 1.0) * hyper[ADAGRAD_LR_DECAY];
    s->chain = chain_prepare(hyper[ADAGRAD_WEIGHT_DECAY], hyper[ADAGRAD_MAXIMIZE], 0);
    s->rate = -hyper[ADAGRAD_LR] / slower;
    s->eps = hyper[ADAGRAD_EPS];
}

OF_RULE_FN void adagrad_foreach_radicand(const adagrad_foreach_scalars *s, unsigned variant,
                                         of_form form, of_element *e, of_real *root) {
    of_real *sum = &e->state[ADAGRAD_SUM];
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
