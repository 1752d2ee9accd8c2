/* SPDX-License-Identifier: BSD-3-Clause */
/* sgd.h: the update rule of SGD with momentum. The formulas are those of
 * PyTorch's fused CPU kernel and, at the end, of its fused CUDA kernel; see
 * docs/numerics.md, also for the 16-bit types, where the CPU kernel's vector
 * code is broken and its scalar code is the reference for every element. */
#ifndef OPTFUSE_RULES_SGD_H
#define OPTFUSE_RULES_SGD_H

#include "real.h"

#define SGD_STATE(X) X(sgd, momentum_buffer)
#define SGD_OPTIONS(X)                                                                             \
    X(sgd, lr) X(sgd, momentum) X(sgd, dampening) X(sgd, weight_decay) X(sgd, nesterov)            \
    X(sgd, maximize)
#define SGD_COUNTERS(X)
OF_ENUMERATE(SGD);

/* Options that get a loop of their own. FIRST: the buffer does not exist yet
 * and starts as the gradient. */
enum { SGD_WITH_DECAY = 1, SGD_WITH_MOMENTUM = 2, SGD_WITH_FIRST = 4, SGD_WITH_NESTEROV = 8 };
#define SGD_VARIANTS(X) X(0) X(1) X(2) X(3) X(6) X(7) X(10) X(11) X(14) X(15)
#define SGD_SETS(X, ...) X(__VA_ARGS__, 0) X(__VA_ARGS__, 1)

/* For 16-bit types the reference's scalar code holds for every element. */
enum { sgd_narrow_is_scalar = 1 };

typedef struct sgd_scalars {
    double lr;
    double momentum;
    double grad_weight; /* 1 - dampening */
    double weight_decay;
    double sign; /* -1 to maximize */
    unsigned variant;
} sgd_scalars;

typedef struct sgd_constants {
    of_real step_size, momentum, grad_weight, weight_decay, sign;
} sgd_constants;

static inline unsigned sgd_state_used(const double *hyper) {
    return hyper[sgd_momentum] != 0.0 ? 1u : 0u;
}

static inline void sgd_prepare(const double *hyper, of_count *count, void *scalars) {
    sgd_scalars *s = (sgd_scalars *)scalars;
    const bool momentum = hyper[sgd_momentum] != 0.0;

    s->lr = hyper[sgd_lr];
    s->momentum = hyper[sgd_momentum];
    s->grad_weight = 1.0 - hyper[sgd_dampening];
    s->weight_decay = hyper[sgd_weight_decay];
    s->sign = hyper[sgd_maximize] != 0.0 ? -1.0 : 1.0;
    s->variant = s->weight_decay != 0.0 ? (unsigned)SGD_WITH_DECAY : 0u;
    if (momentum)
        s->variant |= SGD_WITH_MOMENTUM;
    if (momentum && count->step <= 1.0)
        s->variant |= SGD_WITH_FIRST;
    if (momentum && hyper[sgd_nesterov] != 0.0)
        s->variant |= SGD_WITH_NESTEROV;
}

OF_RULE_FN unsigned sgd_variant(const void *scalars) {
    return ((const sgd_scalars *)scalars)->variant;
}

OF_RULE_FN unsigned sgd_variant_state(unsigned variant) {
    return variant & SGD_WITH_MOMENTUM ? 1u : 0u;
}

OF_RULE_FN sgd_constants sgd_round(const void *scalars, of_form form) {
    const sgd_scalars *s = (const sgd_scalars *)scalars;
    sgd_constants k;
    (void)form;
    k.step_size = -(of_real)s->lr;
    k.momentum = (of_real)s->momentum;
    k.grad_weight = (of_real)s->grad_weight;
    k.weight_decay = (of_real)s->weight_decay;
    k.sign = (of_real)s->sign;
    return k;
}

OF_RULE_FN of_real sgd_buffer(const sgd_constants *k, of_form form, of_real buffer, of_real grad) {
    if (form.tail)
        return of_multiply_add(form.fused, buffer, k->momentum, grad * k->grad_weight);
    return of_multiply_add(of_fuses_spelled(form), k->grad_weight, grad, buffer * k->momentum);
}

/* The first one is copied: a product would lose denormals where the processor takes them
 * for zeros. */
OF_RULE_FN of_real sgd_gradient(const sgd_constants *k, unsigned variant, of_real grad) {
    if (variant & SGD_WITH_FIRST)
        return k->sign < (of_real)0 ? -grad : grad;
    return grad * k->sign;
}

OF_RULE_FN void sgd_element(const sgd_constants *k, unsigned variant, of_form form, of_element *e) {
    const bool spelled = of_fuses_spelled(form);
    of_real *buffer = &e->state[sgd_momentum_buffer];

    of_real grad = sgd_gradient(k, variant, e->grad);
    if (variant & SGD_WITH_DECAY)
        grad = of_multiply_add(spelled, e->param, k->weight_decay, grad);
    if (variant & SGD_WITH_MOMENTUM) {
        *buffer = variant & SGD_WITH_FIRST ? grad : sgd_buffer(k, form, *buffer, grad);
        if (variant & SGD_WITH_NESTEROV)
            grad = of_multiply_add(spelled, *buffer, k->momentum, grad);
        else
            grad = *buffer;
    }
    e->param = of_multiply_add(form.fused, grad, k->step_size, e->param);
}

/* From here on: the formula of the fused CUDA kernel. */

/* Whether it corrects the bias of its averages. */
enum { sgd_cuda_corrects = 0 };

typedef struct sgd_cuda_constants {
    of_real lr, momentum, grad_weight, weight_decay;
    bool maximize, decays, nesterov, first;
    bool swapped; /* in quads the other product of the buffer's sum is fused */
    bool split;   /* in quads the step is rounded before it is subtracted */
} sgd_cuda_constants;

OF_RULE_FN unsigned sgd_cuda_state(const double *hyper) {
    return hyper[sgd_momentum] != 0.0 ? 1u : 0u;
}

OF_RULE_FN sgd_cuda_constants sgd_cuda_round(const double *hyper, const of_step_scalars *now) {
    sgd_cuda_constants k;
    k.lr = now->lr;
    k.momentum = (of_real)hyper[sgd_momentum];
    k.grad_weight = (of_real)1 - (of_real)hyper[sgd_dampening];
    k.weight_decay = (of_real)hyper[sgd_weight_decay];
    k.maximize = hyper[sgd_maximize] != 0.0;
    k.decays = k.weight_decay != (of_real)0;
    k.nesterov = hyper[sgd_nesterov] != 0.0;
    k.first = now->first;
    k.swapped =
        sizeof(of_real) == sizeof(float) && now->early && !now->scaled && k.maximize && !k.decays;
    k.split = now->early && now->scaled && !now->narrow &&
              (sizeof(of_real) == sizeof(float) || hyper[sgd_momentum] == 0.0);
    return k;
}

OF_RULE_FN of_real sgd_cuda_buffer(const sgd_cuda_constants *k, bool quad, of_real buffer,
                                   of_real grad) {
    if (k->first)
        return grad;
    if (quad && k->swapped)
        return of_multiply_add(true, buffer, k->momentum, grad * k->grad_weight);
    return of_multiply_add(true, grad, k->grad_weight, buffer * k->momentum);
}

/* quad: the reference takes this tensor's elements in fours; lane: see cuda/lane.h. */
OF_RULE_FN void sgd_cuda_element(const sgd_cuda_constants *k, unsigned used, bool quad,
                                 unsigned lane, of_element *e) {
    of_real *buffer = &e->state[sgd_momentum_buffer];

    of_real grad = k->maximize ? -e->grad : e->grad;
    if (k->decays)
        grad = of_multiply_add(true, e->param, k->weight_decay, grad);
    if (used & 1u) {
        *buffer = sgd_cuda_buffer(k, quad, *buffer, grad);
        grad = k->nesterov ? of_multiply_add(true, *buffer, k->momentum, grad) : *buffer;
    }
    e->param = of_multiply_add(!(quad && k->split && lane < 3), grad, -k->lr, e->param);
}

#endif
