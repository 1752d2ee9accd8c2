/* SPDX-License-Identifier: BSD-3-Clause */
/* adamax.h: the update rule of Adamax, operator by operator as PyTorch's
 * single-tensor implementation on the CPU. */
#ifndef OPTFUSE_RULES_ADAMAX_H
#define OPTFUSE_RULES_ADAMAX_H

#include "op_by_op.h"

#define ADAMAX_STATE(X) X(adamax, exp_avg) X(adamax, exp_inf)
#define ADAMAX_OPTIONS(X)                                                                          \
    X(adamax, lr) X(adamax, beta1) X(adamax, beta2) X(adamax, eps) X(adamax, weight_decay)         \
    X(adamax, maximize)
#define ADAMAX_COUNTERS(X)
OF_ENUMERATE(ADAMAX);

#define ADAMAX_ROOTS 0
#define ADAMAX_VARIANTS(X) X(0)
#define ADAMAX_SETS(X, ...) X(__VA_ARGS__, 3)

typedef struct adamax_scalars {
    op_by_op_scalars common;
    double step_size, average_weight, beta2, eps;
} adamax_scalars;

OF_USES_ALL_STATE(adamax, ADAMAX)

static inline void adamax_prepare(const double *hyper, of_count *count, void *scalars) {
    adamax_scalars *s = (adamax_scalars *)scalars;
    s->common = op_by_op_prepare(hyper[adamax_weight_decay], hyper[adamax_maximize], 0);
    s->step_size = -(hyper[adamax_lr] / (1.0 - pow(hyper[adamax_beta1], count->step)));
    s->average_weight = 1.0 - hyper[adamax_beta1];
    s->beta2 = hyper[adamax_beta2];
    s->eps = hyper[adamax_eps];
}

OF_RULE_FN void adamax_element(const adamax_scalars *s, unsigned variant, of_form form,
                               of_element *e, const of_real *root) {
    of_real *average = &e->state[adamax_exp_avg], *norm = &e->state[adamax_exp_inf];
    (void)variant, (void)root;
    *average = aten_lerp(form, *average, e->grad, s->average_weight);
    *norm = aten_maximum(aten_mul_number(*norm, s->beta2),
                         aten_add_number(of_absolute(e->grad), s->eps));
    e->param = aten_addcdiv(e->param, *average, *norm, s->step_size);
}

#endif
