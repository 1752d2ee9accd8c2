/* SPDX-License-Identifier: BSD-3-Clause */
/* lion.h: the update rule of Lion ("Symbolic Discovery of Optimization
 * Algorithms", arXiv 2302.06675, algorithm 2), operator by operator as
 * optfuse.optim.Lion. */
#ifndef OPTFUSE_RULES_LION_H
#define OPTFUSE_RULES_LION_H

#include "op_by_op.h"

#define LION_STATE(X) X(lion, exp_avg)
#define LION_OPTIONS(X)                                                                            \
    X(lion, lr) X(lion, beta1) X(lion, beta2) X(lion, weight_decay) X(lion, maximize)
#define LION_COUNTERS(X)
OF_ENUMERATE(LION);

#define LION_ROOTS 0
#define LION_VARIANTS(X) X(0)
#define LION_SETS(X, ...) X(__VA_ARGS__, 1)

typedef struct lion_scalars {
    op_by_op_scalars common;
    double shrink; /* what decay leaves of the parameter */
    double beta1, weight1, beta2, weight2, step_size;
} lion_scalars;

OF_USES_ALL_STATE(lion, LION)

static inline void lion_prepare(const double *hyper, of_count *count, void *scalars) {
    lion_scalars *s = (lion_scalars *)scalars;
    (void)count;
    s->common = op_by_op_prepare(0.0, hyper[lion_maximize], 0);
    s->shrink = 1.0 - hyper[lion_lr] * hyper[lion_weight_decay];
    s->beta1 = hyper[lion_beta1];
    s->weight1 = 1.0 - hyper[lion_beta1];
    s->beta2 = hyper[lion_beta2];
    s->weight2 = 1.0 - hyper[lion_beta2];
    s->step_size = -hyper[lion_lr];
}

OF_RULE_FN void lion_element(const lion_scalars *s, unsigned variant, of_form form, of_element *e,
                             const of_real *root) {
    of_real *average = &e->state[lion_exp_avg];
    (void)variant, (void)root;
    const of_real update = aten_add(form, aten_mul_number(*average, s->beta1), e->grad, s->weight1);
    e->param = aten_mul_number(e->param, s->shrink);
    e->param = aten_add(form, e->param, aten_sign(update), s->step_size);
    *average = aten_add(form, aten_mul_number(*average, s->beta2), e->grad, s->weight2);
}

#endif
