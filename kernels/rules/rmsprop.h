/* SPDX-License-Identifier: BSD-3-Clause */
/* rmsprop.h: the update rule of RMSprop, operator by operator as PyTorch's
 * single-tensor implementation on the CPU. */
#ifndef OPTFUSE_RULES_RMSPROP_H
#define OPTFUSE_RULES_RMSPROP_H

#include "chain.h"

enum { RMSPROP_MOMENTUM_BUFFER, RMSPROP_SQUARE_AVG, RMSPROP_GRAD_AVG, RMSPROP_N_STATE };

enum {
    RMSPROP_LR,
    RMSPROP_ALPHA,
    RMSPROP_EPS,
    RMSPROP_WEIGHT_DECAY,
    RMSPROP_MOMENTUM,
    RMSPROP_CENTERED,
    RMSPROP_MAXIMIZE,
    RMSPROP_N_HYPER
};

/* Options that get a loop of their own. */
enum { RMSPROP_WITH_MOMENTUM = 1, RMSPROP_WITH_CENTER = 2 };
#define RMSPROP_VARIANTS(X) X(0) X(1) X(2) X(3)

typedef struct rmsprop_scalars {
    chain_scalars chain;
    double step_size, alpha, weight, eps, momentum;
} rmsprop_scalars;

OF_RULE_FN unsigned rmsprop_variant_state(unsigned variant) {
    return 1u << RMSPROP_SQUARE_AVG |
           (variant & RMSPROP_WITH_MOMENTUM ? 1u << RMSPROP_MOMENTUM_BUFFER : 0u) |
           (variant & RMSPROP_WITH_CENTER ? 1u << RMSPROP_GRAD_AVG : 0u);
}

static inline unsigned rmsprop_choose(const double *hyper) {
    return (hyper[RMSPROP_MOMENTUM] > 0.0 ? (unsigned)RMSPROP_WITH_MOMENTUM : 0u) |
           (hyper[RMSPROP_CENTERED] != 0.0 ? (unsigned)RMSPROP_WITH_CENTER : 0u);
}

static inline unsigned rmsprop_state_used(const double *hyper) {
    return rmsprop_variant_state(rmsprop_choose(hyper));
}

static inline void rmsprop_prepare(const double *hyper, of_count *count, void *scalars) {
    rmsprop_scalars *s = (rmsprop_scalars *)scalars;
    (void)count;
    s->chain =
        chain_prepare(hyper[RMSPROP_WEIGHT_DECAY], hyper[RMSPROP_MAXIMIZE], rmsprop_choose(hyper));
    s->step_size = -hyper[RMSPROP_LR];
    s->alpha = hyper[RMSPROP_ALPHA];
    s->weight = 1.0 - hyper[RMSPROP_ALPHA];
    s->eps = hyper[RMSPROP_EPS];
    s->momentum = hyper[RMSPROP_MOMENTUM];
}

OF_RULE_FN void rmsprop_radicand(const rmsprop_scalars *s, unsigned variant, of_form form,
                                 of_element *e, of_real *root) {
    of_real *square = &e->state[RMSPROP_SQUARE_AVG], *mean = &e->state[RMSPROP_GRAD_AVG];
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
    of_real *buffer = &e->state[RMSPROP_MOMENTUM_BUFFER];
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
