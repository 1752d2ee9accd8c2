/* SPDX-License-Identifier: BSD-3-Clause */
/* adam.h: the update rule of Adam and AdamW (AdamW is Adam with decoupled
 * weight decay). The formulas are those of PyTorch's fused CPU kernel and, at
 * the end, of its fused CUDA kernel; see docs/numerics.md. */
#ifndef OPTFUSE_RULES_ADAM_H
#define OPTFUSE_RULES_ADAM_H

#include "real.h"

#define ADAM_STATE(X) X(adam, exp_avg) X(adam, exp_avg_sq) X(adam, max_exp_avg_sq)
#define ADAM_OPTIONS(X)                                                                            \
    X(adam, lr) X(adam, beta1) X(adam, beta2) X(adam, eps) X(adam, weight_decay) X(adam, amsgrad)  \
    X(adam, maximize) X(adam, decoupled_weight_decay)
#define ADAM_COUNTERS(X)
OF_ENUMERATE(ADAM);

/* Options that get a loop of their own. */
enum { ADAM_WITH_AMSGRAD = 1, ADAM_WITH_L2 = 2 };
#define ADAM_VARIANTS(X) X(0) X(1) X(2) X(3)
#define ADAM_SETS(X, ...) X(__VA_ARGS__, 3) X(__VA_ARGS__, 7)

/* The reference has usable vector code for 16-bit types. */
enum { adam_narrow_is_scalar = 0 };

/* The scalars of one update, in double as the reference computes them. */
typedef struct adam_scalars {
    double weight_decay;
    double decay_fused; /* 1 - lr * weight_decay, rounded once ... */
    double decay_plain; /* ... and twice; both are 1 without decoupled decay */
    double average_weight;
    double square_weight;
    double beta2;
    double step_size;
    double correction; /* square root of the second bias correction */
    double eps;
    double sign; /* -1 to maximize */
    unsigned variant;
} adam_scalars;

/* The same, rounded to the type of the computation. */
typedef struct adam_constants {
    of_real weight_decay, decay, average_weight, square_weight;
    of_real beta2, step_size, correction, reciprocal, eps, sign;
    bool from_average; /* the running average moves from itself, not from the gradient */
} adam_constants;

static inline unsigned adam_state_used(const double *hyper) {
    return hyper[adam_amsgrad] != 0.0 ? 7u : 3u;
}

static inline void adam_prepare(const double *hyper, of_count *count, void *scalars) {
    adam_scalars *s = (adam_scalars *)scalars;
    const double lr = hyper[adam_lr];
    const double decay = hyper[adam_weight_decay];
    const bool decoupled = decay != 0.0 && hyper[adam_decoupled_weight_decay] != 0.0;
    const bool l2 = decay != 0.0 && !decoupled;

    s->weight_decay = decay;
    s->decay_fused = decoupled ? fma(-lr, decay, 1.0) : 1.0;
    s->decay_plain = decoupled ? 1.0 - lr * decay : 1.0;
    s->average_weight = 1.0 - hyper[adam_beta1];
    s->square_weight = 1.0 - hyper[adam_beta2];
    s->beta2 = hyper[adam_beta2];
    s->step_size = lr / (1.0 - pow(hyper[adam_beta1], count->step));
    s->correction = sqrt(1.0 - pow(hyper[adam_beta2], count->step));
    s->eps = hyper[adam_eps];
    s->sign = hyper[adam_maximize] != 0.0 ? -1.0 : 1.0;
    s->variant = (hyper[adam_amsgrad] != 0.0 ? (unsigned)ADAM_WITH_AMSGRAD : 0u) |
                 (l2 ? (unsigned)ADAM_WITH_L2 : 0u);
}

OF_RULE_FN unsigned adam_variant(const void *scalars) {
    return ((const adam_scalars *)scalars)->variant;
}

/* Bit i is set if state[i] takes part in a variant. */
OF_RULE_FN unsigned adam_variant_state(unsigned variant) {
    return variant & ADAM_WITH_AMSGRAD ? 7u : 3u;
}

OF_RULE_FN adam_constants adam_round(const void *scalars, of_form form) {
    const adam_scalars *s = (const adam_scalars *)scalars;
    adam_constants k;
    k.weight_decay = (of_real)s->weight_decay;
    k.decay = (of_real)(of_fuses_spelled(form) ? s->decay_fused : s->decay_plain);
    k.average_weight = (of_real)s->average_weight;
    k.from_average = of_absolute(k.average_weight) < (of_real)0.5;
    if (!k.from_average) /* equal but for the sign of zero, when beta1 is 0 */
        k.average_weight =
            form.tail ? -((of_real)1 - k.average_weight) : k.average_weight - (of_real)1;
    k.square_weight = (of_real)s->square_weight;
    k.beta2 = (of_real)s->beta2;
    k.step_size = -(of_real)s->step_size;
    k.correction = (of_real)s->correction;
    k.reciprocal = (of_real)1 / k.correction;
    k.eps = (of_real)s->eps;
    k.sign = (of_real)s->sign;
    return k;
}

/* The reference's vector code gives NaN if one side is NaN; its scalar code is
 * std::max, which keeps the old value when the new one is NaN. */
OF_RULE_FN of_real adam_maximum(bool tail, of_real old, of_real now) {
    if (tail)
        return old < now ? now : old;
    const of_real larger = old > now ? old : now;
    return old != old ? old : larger;
}

/* The product of the average of squares that is rounded on its own: in vectors, the compilers of
 * PyTorch's x86-64 and AArch64 packages have fused different ones. */
#if defined(__aarch64__)
enum { adam_rounds_gradient_first = true };
#else
enum { adam_rounds_gradient_first = false };
#endif

OF_RULE_FN void adam_element(const adam_constants *k, unsigned variant, of_form form,
                             of_element *e) {
    const bool fused = form.fused;
    of_real *average = &e->state[adam_exp_avg];
    of_real *square = &e->state[adam_exp_avg_sq];
    of_real *largest = &e->state[adam_max_exp_avg_sq];

    of_real grad = e->grad * k->sign;
    if (variant & ADAM_WITH_L2)
        grad = of_multiply_add(fused, e->param, k->weight_decay, grad);
    const of_real param = e->param * k->decay;

    const of_real base = k->from_average ? *average : grad;
    *average =
        of_multiply_add(of_fuses_spelled(form), k->average_weight, grad - *average, base);

    const of_real weighted = k->square_weight * grad;
    if (form.tail || adam_rounds_gradient_first)
        *square = of_multiply_add(fused, *square, k->beta2, weighted * grad);
    else
        *square = of_multiply_add(fused, weighted, grad, *square * k->beta2);

    of_real denominator = *square;
    if (variant & ADAM_WITH_AMSGRAD)
        denominator = *largest = adam_maximum(form.tail, *largest, *square);
    denominator =
        of_divide_known(of_square_root(denominator), k->correction, k->reciprocal) + k->eps;
    e->param = param + k->step_size * *average / denominator;
}

/* From here on: the formula of the fused CUDA kernel. */

/* Whether it corrects the bias of its averages. */
enum { adam_cuda_corrects = 1 };

typedef struct adam_cuda_constants {
    of_real beta1, beta2, weight_decay, shrink, eps, step_size, correction, reciprocal;
    bool maximize, l2, decoupled;
    bool rounded_l2; /* without amsgrad the product of L2 decay is rounded before the sum: of the
                        first lane, to maximize of all */
} adam_cuda_constants;

OF_RULE_FN unsigned adam_cuda_state(const double *hyper) {
    return hyper[adam_amsgrad] != 0.0 ? 7u : 3u;
}

OF_RULE_FN adam_cuda_constants adam_cuda_round(const double *hyper, const of_step_scalars *now) {
    adam_cuda_constants k;
    k.beta1 = of_rounded(hyper[adam_beta1]);
    k.beta2 = of_rounded(hyper[adam_beta2]);
    k.eps = of_rounded(hyper[adam_eps]);
    k.weight_decay = of_rounded(hyper[adam_weight_decay]);
    k.shrink = now->lr * k.weight_decay;
    k.step_size = now->lr / now->correction1;
    k.correction = now->correction2;
    k.reciprocal = (of_real)1 / k.correction;
    k.maximize = hyper[adam_maximize] != 0.0;
    k.decoupled = k.weight_decay != (of_real)0 && hyper[adam_decoupled_weight_decay] != 0.0;
    k.l2 = k.weight_decay != (of_real)0 && !k.decoupled;
#ifdef OF_REAL_FLOAT
    k.rounded_l2 = now->early && !now->scaled;
#else
    k.rounded_l2 = false;
#endif
    return k;
}

OF_RULE_FN of_real adam_cuda_gradient(const adam_cuda_constants *k, unsigned used, unsigned lane,
                                      const of_element *e) {
    const of_real grad = k->maximize ? -e->grad : e->grad;
    if (!k->l2)
        return grad;
#ifdef OF_REAL_FLOAT
    if (!(used & 4u) && k->rounded_l2 && (k->maximize || lane == 0))
        return of_multiply_add(false, e->param, k->weight_decay, grad);
#else
    (void)used, (void)lane;
#endif
    return of_multiply_add(true, e->param, k->weight_decay, grad);
}

/* A division takes a GPU longer than it takes to bring an element of 16 bits, but not one
 * of 32. */
OF_RULE_FN of_real adam_cuda_correct(const adam_cuda_constants *k, of_real root) {
#ifdef OF_IS_NARROW
    return of_divide_known(root, k->correction, k->reciprocal);
#else
    return root / k->correction;
#endif
}

OF_RULE_FN void adam_cuda_element(const adam_cuda_constants *k, unsigned used, bool quad,
                                  unsigned lane, of_element *e) {
    of_real *average = &e->state[adam_exp_avg];
    of_real *square = &e->state[adam_exp_avg_sq];
    of_real *largest = &e->state[adam_max_exp_avg_sq];
    (void)quad;

    const of_real grad = adam_cuda_gradient(k, used, lane, e);
    const of_real squared = grad * grad;
    of_real param = e->param;
    if (k->decoupled)
        param = of_multiply_add(true, -k->shrink, param, param);
    *average =
        of_multiply_add(true, k->beta1, *average, of_multiply_add(true, -k->beta1, grad, grad));
    *square = of_multiply_add(true, k->beta2, *square,
                              of_multiply_add(true, -k->beta2, squared, squared));
    of_real denominator = *square;
    if (used & 4u)
        denominator = *largest = adam_maximum(true, *largest, *square);
    denominator = adam_cuda_correct(k, of_square_root(denominator)) + k->eps;
    e->param = param - k->step_size * *average / denominator;
}

#endif
