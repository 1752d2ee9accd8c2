/* SPDX-License-Identifier: BSD-3-Clause */
/* adadelta.h: the update rule of Adadelta, operator by operator as PyTorch's
 * single-tensor implementation on the CPU. */
#ifndef OPTFUSE_RULES_ADADELTA_H
#define OPTFUSE_RULES_ADADELTA_H

#include "op_by_op.h"

#define ADADELTA_STATE(X) X(adadelta, square_avg) X(adadelta, acc_delta)
#define ADADELTA_OPTIONS(X)                                                                        \
    X(adadelta, lr) X(adadelta, rho) X(adadelta, eps) X(adadelta, weight_decay)                    \
    X(adadelta, maximize)
#define ADADELTA_COUNTERS(X)
OF_ENUMERATE(ADADELTA);

#define ADADELTA_ROOTS 2
#define ADADELTA_VARIANTS(X) X(0)
#define ADADELTA_SETS(X, ...) X(__VA_ARGS__, 3)

typedef struct adadelta_scalars {
    op_by_op_scalars common;
    double step_size, rho, weight, eps;
} adadelta_scalars;

OF_USES_ALL_STATE(adadelta, ADADELTA)

static inline void adadelta_prepare(const double *hyper, of_count *count, void *scalars) {
    adadelta_scalars *s = (adadelta_scalars *)scalars;
    (void)count;
    s->common = op_by_op_prepare(hyper[adadelta_weight_decay], hyper[adadelta_maximize], 0);
    s->step_size = -hyper[adadelta_lr];
    s->rho = hyper[adadelta_rho];
    s->weight = 1.0 - hyper[adadelta_rho];
    s->eps = hyper[adadelta_eps];
}

OF_RULE_FN void adadelta_radicand(const adadelta_scalars *s, unsigned variant, of_form form,
                                  of_element *e, of_real *root) {
    of_real *square = &e->state[adadelta_square_avg];
    (void)variant;
    *square = aten_mul_number(*square, s->rho);
    *square = aten_addcmul(form, *square, e->grad, e->grad, s->weight);
    root[0] = aten_add_number(*square, s->eps);
    root[1] = aten_add_number(e->state[adadelta_acc_delta], s->eps);
}

OF_RULE_FN void adadelta_element(const adadelta_scalars *s, unsigned variant, of_form form,
                                 of_element *e, const of_real *root) {
    of_real *acc = &e->state[adadelta_acc_delta];
    const of_real delta = aten_mul(aten_div(root[1], root[0]), e->grad);
    (void)variant;
    *acc = aten_mul_number(*acc, s->rho);
    *acc = aten_addcmul(form, *acc, delta, delta, s->weight);
    e->param = aten_add(form, e->param, delta, s->step_size);
}

#endif
