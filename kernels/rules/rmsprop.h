/* SPDX-License-Identifier: BSD-3-Clause */
/* rmsprop.h: the update rule of RMSprop, operator by operator as PyTorch's
 * single-tensor implementation on the CPU. */
#ifndef OPTFUSE_RULES_RMSPROP_H
#define OPTFUSE_RULES_RMSPROP_H

#include "op_by_op.h"

#define RMSPROP_STATE(X) X(rmsprop, momentum_buffer) X(rmsprop, square_avg) X(rmsprop, grad_avg)
#define RMSPROP_OPTIONS(X)                                                                         \
    X(rmsprop, lr) X(rmsprop, alpha) X(rmsprop, eps) X(rmsprop, weight_decay) X(rmsprop, momentum) \
    X(rmsprop, centered) X(rmsprop, maximize)
#define RMSPROP_COUNTERS(X)
OF_ENUMERATE(RMSPROP);

/* Options that get a loop of their own. */
enum { RMSPROP_WITH_MOMENTUM = 1, RMSPROP_WITH_CENTER = 2 };
#define RMSPROP_ROOTS 1
#define RMSPROP_VARIANTS(X) X(0) X(1) X(2) X(3)
#define RMSPROP_SETS(X, ...) X(__VA_ARGS__, 2) X(__VA_ARGS__, 3) X(__VA_ARGS__, 6) X(__VA_ARGS__, 7)

typedef struct rmsprop_scalars {
    op_by_op_scalars common;
    double step_size, alpha, weight, eps, momentum;
} rmsprop_scalars;

OF_RULE_FN unsigned rmsprop_variant_state(unsigned variant) {
    return 1u << rmsprop_square_avg |
           (variant & RMSPROP_WITH_MOMENTUM ? 1u << rmsprop_momentum_buffer : 0u) |
           (variant & RMSPROP_WITH_CENTER ? 1u << rmsprop_grad_avg : 0u);
}

static inline unsigned rmsprop_choose(const double *hyper) {
    return (hyper[rmsprop_momentum] > 0.0 ? (unsigned)RMSPROP_WITH_MOMENTUM : 0u) |
           (hyper[rmsprop_centered] != 0.0 ? (unsigned)RMSPROP_WITH_CENTER : 0u);
}

static inline unsigned rmsprop_state_used(const double *hyper) {
    return rmsprop_variant_state(rmsprop_choose(hyper));
}

static inline void rmsprop_prepare(const double *hyper, of_count *count, void *scalars) {
    rmsprop_scalars *s = (rmsprop_scalars *)scalars;
    (void)count;
    s->common =
        op_by_op_prepare(hyper[rmsprop_weight_decay], hyper[rmsprop_maximize], rmsprop_choose(hyper));
    s->step_size = -hyper[rmsprop_lr];
    s->alpha = hyper[rmsprop_alpha];
    s->weight = 1.0 - hyper[rmsprop_alpha];
    s->eps = hyper[rmsprop_eps];
    s->momentum = hyper[rmsprop_momentum];
}

OF_RULE_FN void rmsprop_radicand(const rmsprop_scalars *s, unsigned variant, of_form form,
                                 of_element *e, of_real *root) {
    of_real *square = &e->state[rmsprop_square_avg], *mean = &e->state[rmsprop_grad_avg];
    *square = aten_mul_number(*square, s->alpha);
    *square = aten_addcmul(form, *square, e->grad, e->grad, s->weight);
    root[0] = *square;
    if (variant & RMSPROP_WITH_CENTER) {
        *mean = aten_lerp(form, *mean, e->grad, s->weight);
        root[0] = aten_addcmul(form, *square, *mean, *mean, -1.0);
    }
}

OF_RULE_FN void rmsprop_element(const rmsprop_scalars *s, unsigned variant, of_form form,
                                of_element *e, const of_real *root) {
    of_real *buffer = &e->state[rmsprop_momentum_buffer];
    const of_real average = aten_add_number(root[0], s->eps);
    if (variant & RMSPROP_WITH_MOMENTUM) {
        *buffer = aten_mul_number(*buffer, s->momentum);
        *buffer = aten_addcdiv(*buffer, e->grad, average, 1.0);
        e->param = aten_add(form, e->param, *buffer, s->step_size);
    } else {
        e->param = aten_addcdiv(e->param, e->grad, average, s->step_size);
    }
}

#endif
