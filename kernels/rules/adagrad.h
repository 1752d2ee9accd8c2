/* SPDX-License-Identifier: BSD-3-Clause */
/* adagrad.h: the update rule of Adagrad. The formula is that of PyTorch's fused
 * CPU kernel; see docs/numerics.md. */
#ifndef OPTFUSE_RULES_ADAGRAD_H
#define OPTFUSE_RULES_ADAGRAD_H

#include "op_by_op.h"

#define ADAGRAD_STATE(X) X(adagrad, sum)
#define ADAGRAD_OPTIONS(X)                                                                         \
    X(adagrad, lr) X(adagrad, lr_decay) X(adagrad, weight_decay) X(adagrad, eps)                   \
    X(adagrad, maximize)
#define ADAGRAD_COUNTERS(X)
OF_ENUMERATE(ADAGRAD);

/* Options that get a loop of their own. */
enum { ADAGRAD_WITH_DECAY = 1 };
#define ADAGRAD_ROOTS 1
#define ADAGRAD_VARIANTS(X) X(0) X(1)
#define ADAGRAD_SETS(X, ...) X(__VA_ARGS__, 1)

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

static inline void adagrad_prepare(const double *hyper, of_count *count, void *scalars) {
    adagrad_scalars *s = (adagrad_scalars *)scalars;
    const double lr = hyper[adagrad_lr], lr_decay = hyper[adagrad_lr_decay];
    s->rate_fused = lr / fma(count->step - 1.0, lr_decay, 1.0);
    s->rate_plain = lr / (1.0 + (count->step - 1.0) * lr_decay);
    s->weight_decay = hyper[adagrad_weight_decay];
    s->eps = hyper[adagrad_eps];
    s->sign = hyper[adagrad_maximize] != 0.0 ? -1.0 : 1.0;
    s->variant = s->weight_decay != 0.0 ? (unsigned)ADAGRAD_WITH_DECAY : 0u;
}

OF_RULE_FN unsigned adagrad_variant(const void *scalars) {
    return ((const adagrad_scalars *)scalars)->variant;
}

OF_USES_ALL_STATE(adagrad, ADAGRAD)

/* The reference's vector code rounds the scalars to the type in memory. */
OF_RULE_FN of_real adagrad_scalar(of_form form, double value) {
    return form.tail ? (of_real)value : aten_round((of_real)value);
}

OF_RULE_FN adagrad_constants adagrad_round(const void *scalars, of_form form) {
    const adagrad_scalars *s = (const adagrad_scalars *)scalars;
    adagrad_constants k;
    k.rate = adagrad_scalar(form, of_fuses_spelled(form) ? s->rate_fused : s->rate_plain);
    k.weight_decay = adagrad_scalar(form, s->weight_decay);
    k.eps = adagrad_scalar(form, s->eps);
    k.sign = (of_real)s->sign;
    return k;
}

OF_RULE_FN void adagrad_element(const adagrad_constants *k, unsigned variant, of_form form,
                                of_element *e) {
    of_real *sum = &e->state[adagrad_sum];
    of_real grad = e->grad * k->sign;
    if (variant & ADAGRAD_WITH_DECAY)
        grad = of_multiply_add(form.fused, e->param, k->weight_decay, grad);
    *sum = of_multiply_add(form.fused, grad, grad, *sum);
    e->param = e->param - k->rate * grad / (of_square_root(*sum) + k->eps);
}

#endif
