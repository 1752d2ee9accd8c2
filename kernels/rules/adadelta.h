/* SPDX-License-Identifier: BSD-3-Clause */
/* adadelta.h: the update rule of Adadelta, operator by operator as PyTorch's
 * single-tensor implementation on the CPU. */
#ifndef OPTFUSE_RULES_ADADELTA_H
#define OPTFUSE_RULES_ADADELTA_H

#include "chain.h"

enum { ADADELTA_SQUARE_AVG, ADADELTA_ACC_DELTA, ADADELTA_N_STATE };

enum {
    ADADELTA_LR,
    ADADELTA_RHO,
    ADADELTA_EPS,
    ADADELTA_WEIGHT_DECAY,
    ADADELTA_MAXIMIZE,
    ADADELTA_N_HYPER
};

#define ADADELTA_VARIANTS(X) X(0)

typedef struct adadelta_scalars {
    chain_scalars chain;
    double step_size, rho, weight, eps;
} adadelta_scalars;

OF_RULE_FN unsigned adadelta_variant_state(unsigned variant) {
    (void)variant;
    return 3u;
}

static inline unsigned adadelta_state_used(const double *hyper) {
    (void)hyper;
    return 3u;
}

static inline void adadelta_prepare(const double *hyper, of_count *count, void *scalars) {
    adadelta_scalars *s = (adadelta_scalars *)scalars;
    (void)count;
    s->chain = chain_prepare(hyper[ADADELTA_WEIGHT_DECAY], hyper[ADADELTA_MAXIMIZE], 0);
    s->step_size = -hyper[ADADELTA_LR];
    s->rho = hyper[ADADELTA_RHO];
    s->weight = 1.0 - hyper[ADADELTA_RHO];
    s->eps = hyper[ADADELTA_EPS];
}

OF_RULE_FN void adadelta_radicand(const adadelta_scalars *s, unsigned variant, of_form form,
                                  of_element *e, of_real *root) {
    of_real *square = &e->state[ADADELTA_SQUARE_AVG];
    (void)variant;
    *square = aten_mul_number(*square, s->rho);
    *square = aten_addcmul(form, *square, e->grad, e->grad, s->weight);
    root[0] = aten_add_number(*square, s->eps);
    root[1] = aten_add_number(e->state[ADADELTA_ACC_DELTA], s->eps);
}

OF_RULE_FN void adadelta_element(const adadelta_scalars *s, unsigned variant, of_form form,
                                 of_element *e, const of_real *root) {
    of_real *acc = &e->state[ADADELTA_ACC_DELTA];
    const of_real delta = aten_mul(aten_div(root[1], root[0]), e->grad);
    (void)variant;
    *acc = aten_mul_number(*acc, s->rho);
    *acc = aten_addcmul(form, *acc, delta, delta, s->weight);
    e->param = aten_add(form, e->param, delta, s->step_size);
}

#endif
