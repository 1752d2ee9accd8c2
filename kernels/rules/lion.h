/* SPDX-License-Identifier: BSD-3-Clause */
/* lion.h: the update rule of Lion ("Symbolic Discovery of Optimization
 * Algorithms", arXiv 2302.06675, algorithm 2), operator by operator as
 * optfuse.optim.Lion. */
#ifndef OPTFUSE_RULES_LION_H
#define OPTFUSE_RULES_LION_H

#include "chain.h"

enum { LION_EXP_AVG, LION_N_STATE };

enum { LION_LR, LION_BETA1, LION_BETA2, LION_WEIGHT_DECAY, LION_MAXIMIZE, LION_N_HYPER };

#define LION_VARIANTS(X) X(0)

typedef struct lion_scalars {
    chain_scalars chain;
    double shrink; /* what decay leaves of the parameter */
    double beta1, weight1, beta2, weight2, step_size;
} lion_scalars;

OF_RULE_FN unsigned lion_variant_state(unsigned variant) {
    (void)variant;
    return 1u;
}

static inline unsigned lion_state_used(const double *hyper) {
    (void)hyper;
    return 1u;
}

static inline void lion_prepare(const double *hyper, of_count *count, void *scalars) {
    lion_scalars *s = (lion_scalars *)scalars;
    (void)count;
    s->chain = chain_prepare(0.0, hyper[LION_MAXIMIZE], 0);
    s->shrink = 1.0 - hyper[LION_LR] * hyper[LION_WEIGHT_DECAY];
    s->beta1 = hyper[LION_BETA1];
    s->weight1 = 1.0 - hyper[LION_BETA1];
    s->beta2 = hyper[LION_BETA2];
    s->weight2 = 1.0 - hyper[LION_BETA2];
    s->step_size = -hyper[LION_LR];
}

OF_RULE_FN void lion_element(const lion_scalars *s, unsigned variant, of_form form, of_element *e,
                             const of_real *root) {
    of_real *average = &e->state[LION_EXP_AVG];
    (void)variant, (void)root;
    const of_real update = aten_add(form, aten_mul_number(*average, s->beta1), e->grad, s->weight1);
    e->param = aten_mul_number(e->param, s->shrink);
    e->param = aten_add(form, e->param, aten_sign(update), s->step_size);
    *average = aten_add(form, aten_mul_number(*average, s->beta2), e->grad, s->weight2);
}

#endif
