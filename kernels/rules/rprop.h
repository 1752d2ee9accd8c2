/* SPDX-License-Identifier: BSD-3-Clause */
/* rprop.h: the update rule of Rprop, operator by operator as PyTorch's
 * single-tensor implementation on the CPU. The learning rate is the first step size;
 * updates do not use it. */
#ifndef OPTFUSE_RULES_RPROP_H
#define OPTFUSE_RULES_RPROP_H

#include "op_by_op.h"

#define RPROP_STATE(X) X(rprop, prev) X(rprop, step_size)
#define RPROP_OPTIONS(X)                                                                           \
    X(rprop, etaminus) X(rprop, etaplus) X(rprop, step_size_min) X(rprop, step_size_max)           \
    X(rprop, maximize)
#define RPROP_COUNTERS(X)
OF_ENUMERATE(RPROP);

#define RPROP_ROOTS 0
#define RPROP_VARIANTS(X) X(0)
#define RPROP_SETS(X, ...) X(__VA_ARGS__, 3)

typedef struct rprop_scalars {
    op_by_op_scalars common;
    double etaminus, etaplus, least, most;
} rprop_scalars;

OF_USES_ALL_STATE(rprop, RPROP)

static inline void rprop_prepare(const double *hyper, of_count *count, void *scalars) {
    rprop_scalars *s = (rprop_scalars *)scalars;
    (void)count;
    s->common = op_by_op_prepare(0.0, hyper[rprop_maximize], 0);
    s->etaminus = hyper[rprop_etaminus];
    s->etaplus = hyper[rprop_etaplus];
    s->least = hyper[rprop_step_size_min];
    s->most = hyper[rprop_step_size_max];
}

/* One after the other, as the reference does: what was set is looked at again,
 * and in 16 bits etaminus can be 0 or 1. */
OF_RULE_FN of_real rprop_factor(of_real sign, of_real etaminus, of_real etaplus) {
    sign = sign > (of_real)0 ? etaplus : sign;
    sign = sign < (of_real)0 ? etaminus : sign;
    return sign == (of_real)0 ? (of_real)1 : sign;
}

OF_RULE_FN void rprop_element(const rprop_scalars *s, unsigned variant, of_form form, of_element *e,
                              const of_real *root) {
    of_real *prev = &e->state[rprop_prev], *step_size = &e->state[rprop_step_size];
    const of_real etaminus = aten_round((of_real)s->etaminus);
    const of_real etaplus = aten_round((of_real)s->etaplus);
    (void)variant, (void)root;
    const of_real factor = rprop_factor(aten_sign(aten_mul(e->grad, *prev)), etaminus, etaplus);
    *step_size = aten_clamp(aten_mul(*step_size, factor), s->least, s->most);
    *prev = factor == etaminus ? (of_real)0 : e->grad;
    e->param = aten_addcmul(form, e->param, aten_sign(*prev), *step_size, -1.0);
}

#endif
