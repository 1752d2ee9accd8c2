/* SPDX-License-Identifier: BSD-3-Clause */
/* adagrad.h: the update rule of Adagrad. The formula is that of PyTorch's fused
 * CPU kernel; see docs/numerics.md. */
#ifndef OPTFUSE_RULES_ADAGRAD_H
#define OPTFUSE_RULES_ADAGRAD_H

#include "chain.h"

enum { ADAGRAD_SUM, ADAGRAD_N_STATE };

enum {
    ADAGRAD_LR,
    ADAGRAD_LR_DECAY,
    ADAGRAD_WEIGHT_DECAY,
    ADAGRAD_EPS,
    ADAGRAD_MAXIMIZE,
    ADAGRAD_N_HYPER
};

/* Options that get a loop of their own. */
enum { ADAGRAD_WITH_DECAY = 1 };
#define ADAGRAD_VARIANTS(X) X(0) X(1)

/* The reference has usable vector code for 16-bit types. */
enum { adagrad_narrow_is_scalar = 0 };

typedef struct adagrad_scalars {
    double rate_fused; /* the learning rate, its decay's sum rounded once ... */
    double rate_plain; /* ... and twice */
    double weight_decay, eps;
    double sign; /* -1 to maximize */
    unsigned variant;
} adagrad_scalars;

typedef struct adagrad_constants {
    of_real rate, weight_decay, eps, sign;
} adagrad_constants;

static inline unsigned adagrad_state_used(const double *hyper) {
    (void)hyper;
    return 1u;
}

static inline void adagrad_prepare(const double *hyper, of_count *count, void *scalars) {
    adagrad_scalars *s = (adagrad_scalars *)scalars;
    const double lr = hyper[ADAGRAD_LR], lr_decay = hyper[ADAGRAD_LR_DECAY];
    s->rate_fused = lr / fma(count->step - 1.0, lr_decay, 1.0);
    s->rate_plain = lr / (1.0 + (count->step - 1.0) * lr_decay);
    s->weight_decay = hyper[ADAGRAD_WEIGHT_DECAY];
    s->eps = hyper[ADAGRAD_EPS];
    s->sign = hyper[ADAGRAD_MAXIMIZE] != 0.0 ? -1.0 : 1.0;
    s->variant = s->weight_decay != 0.0 ? (unsigned)ADAGRAD_WITH_DECAY : 0u;
}

OF_RULE_FN unsigned adagrad_variant(const void *scalars) {
    return ((const adagrad_scalars *)scalars)->variant;
}

OF_RULE_FN unsigned adagrad_variant_state(unsigned variant) {
    (void)variant;
    return 1u;
}

/* The reference's vector code rounds the scalars to the type in memory. */
OF_RULE_FN of_real adagrad_scalar(of_form form, double value) {
    return form.tail ? (of_real)value : aten_round((of_real)value);
}

OF_RULE_FN adagrad_constants adagrad_round(const void *scalars, of_form form) {
    const adagrad_scalars *s = (const adagrad_scalars *)scalars;
    adagrad_constants k;
    k.rate = adagrad_scalar(form, form.fused ? s->rate_fused : s->rate_plain);
    k.weight_decay = adagrad_scalar(form, s->weight_decay);
    k.eps = adagrad_scalar(form, s->eps);
    k.sign = (of_real)s->sign;
    return k;
}

OF_RULE_FN void adagrad_element(const adagrad_constants *k, unsigned variant, of_form form,
                                of_element *e) {
    of_real *sum = &e->state[ADAGRAD_SUM];
    of_real grad = e->grad * k->sign;
    if (variant & ADAGRAD_WITH_DECAY)
        grad = of_multiply_add(form.fused, e->param, k->weight_decay, grad);
    *sum = of_multiply_add(form.fused, grad, grad, *sum);
    e->param = e->param - k->rate * grad / (of_square_root(*sum) + k->eps);
}

#endif
