/* SPDX-License-Identifier: BSD-3-Clause */
/* nadam.h: the update rule of NAdam, operator by operator as PyTorch's
 * single-tensor implementation on the CPU. */
#ifndef OPTFUSE_RULES_NADAM_H
#define OPTFUSE_RULES_NADAM_H

#include "chain.h"

enum { NADAM_EXP_AVG, NADAM_EXP_AVG_SQ, NADAM_N_STATE };

enum {
    NADAM_LR,
    NADAM_BETA1,
    NADAM_BETA2,
    NADAM_EPS,
    NADAM_WEIGHT_DECAY,
    NADAM_MOMENTUM_DECAY,
    NADAM_DECOUPLED_WEIGHT_DECAY,
    NADAM_MAXIMIZE,
    NADAM_N_HYPER
};

/* The number in the optimizer's state that an update changes. */
enum { NADAM_MU_PRODUCT, NADAM_N_COUNTERS };

#define NADAM_VARIANTS(X) X(0)

typedef struct nadam_scalars {
    chain_scalars chain;
    double shrink; /* what decoupled decay leaves of the parameter */
    double average_weight, beta2, square_weight, correction, eps;
    double grad_step, average_step;
} nadam_scalars;

OF_RULE_FN unsigned nadam_variant_state(unsigned variant) {
    (void)variant;
    return 3u;
}

static inline unsigned nadam_state_used(const double *hyper) {
    (void)hyper;
    return 3u;
}

static inline double nadam_momentum(const double *hyper, double step) {
    return hyper[NADAM_BETA1] * (1.0 - 0.5 * pow(0.96, step * hyper[NADAM_MOMENTUM_DECAY]));
}

static inline void nadam_prepare(const double *hyper, of_count *count, void *scalars) {
    nadam_scalars *s = (nadam_scalars *)scalars;
    const double lr = hyper[NADAM_LR], decay = hyper[NADAM_WEIGHT_DECAY];
    const bool decoupled = decay != 0.0 && hyper[NADAM_DECOUPLED_WEIGHT_DECAY] != 0.0;
    const double mu = nadam_momentum(hyper, count->step);
    const double mu_next = nadam_momentum(hyper, count->step + 1.0);
    double *product = &count->counters[NADAM_MU_PRODUCT];

    *product = chain_number(count->single, *product * chain_number(count->single, mu));
    s->chain = chain_prepare(decoupled ? 0.0 : decay, hyper[NADAM_MAXIMIZE], 0);
    s->shrink = decoupled ? 1.0 - lr * decay : 1.0;
    s->average_weight = 1.0 - hyper[NADAM_BETA1];
    s->beta2 = hyper[NADAM_BETA2];
    s->square_weight = 1.0 - hyper[NADAM_BETA2];
    s->correction = 1.0 - pow(hyper[NADAM_BETA2], count->step);
    s->eps = hyper[NADAM_EPS];
    s->grad_step = -lr * (1.0 - mu) / (1.0 - *product);
    s->average_step = -lr * mu_next / (1.0 - *product * mu_next);
}

OF_RULE_FN void nadam_radicand(const nadam_scalars *s, unsigned variant, of_form form,
                               of_element *e, of_real *root) {
    of_real *average = &e->state[NADAM_EXP_AVG], *square = &e->state[NADAM_EXP_AVG_SQ];
    (void)variant;
    *average = aten_lerp(form, *average, e->grad, s->average_weight);
    *square = aten_mul_number(*square, s->beta2);
    *square = aten_addcmul(form, *square, e->grad, e->grad, s->square_weight);
    root[0] = aten_div_number(*square, s->correction);
}

OF_RULE_FN void nadam_element(const nadam_scalars *s, unsigned variant, of_form form, of_element *e,
                              const of_real *root) {
    const of_real denominator = aten_add_number(root[0], s->eps);
    (void)variant, (void)form;
    e->param = aten_mul_number(e->param, s->shrink);
    e->param = aten_addcdiv(e->param, e->grad, denominator, s->grad_step);
    e->param = aten_addcdiv(e->param, e->state[NADAM_EXP_AVG], denominator, s->average_step);
}

#endif
