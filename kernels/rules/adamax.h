/* SPDX-License-Identifier: BSD-3-Clause */
/* adamax.h: the update rule of Adamax, operator by operator as PyTorch's
 * single-tensor implementation on the CPU. */
#ifndef OPTFUSE_RULES_ADAMAX_H
#define OPTFUSE_RULES_ADAMAX_H

#include "chain.h"

enum { ADAMAX_EXP_AVG, ADAMAX_EXP_INF, ADAMAX_N_STATE };

enum {
    ADAMAX_LR,
    ADAMAX_BETA1,
    ADAMAX_BETA2,
    ADAMAX_EPS,
    ADAMAX_WEIGHT_DECAY,
    ADAMAX_MAXIMIZE,
    ADAMAX_N_HYPER
};

#define ADAMAX_VARIANTS(X) X(0)

typedef struct adamax_scalars {
    chain_scalars chain;
    double step_size, average_weight, beta2, eps;
} adamax_scalars;

OF_RULE_FN unsigned adamax_variant_state(unsigned variant) {
    (void)variant;
    return 3u;
}

static inline unsigned adamax_state_used(const double *hyper) {
    (void)hyper;
    return 3u;
}

static inline void adamax_prepare(const double *hyper, of_count *count, void *scalars) {
    adamax_scalars *s = (adamax_scalars *)scalars;
    s->chain = chain_prepare(hyper[ADAMAX_WEIGHT_DECAY], hyper[ADAMAX_MAXIMIZE], 0);
    s->step_size = -(hyper[ADAMAX_LR] / (1.0 - pow(hyper[ADAMAX_BETA1], count->step)));
    s->average_weight = 1.0 - hyper[ADAMAX_BETA1];
    s->beta2 = hyper[ADAMAX_BETA2];
    s->eps = hyper[ADAMAX_EPS];
}

OF_RULE_FN void adamax_element(const adamax_scalars *s, unsigned variant, of_form form,
                               of_element *e, const of_real *root) {
    of_real *average = &e->state[ADAMAX_EXP_AVG], *norm = &e->state[ADAMAX_EXP_INF];
    (void)variant, (void)root;
    *average = aten_lerp(form, *average, e->grad, s->average_weight);
    *norm = aten_maximum(aten_mul_number(*norm, s->beta2),
                         aten_add_number(of_absolute(e->grad), s->eps));
    e->param = aten_addcdiv(e->param, *average, *norm, s->step_size);
}

#endif
