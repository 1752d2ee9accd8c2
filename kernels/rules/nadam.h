/* SPDX-License-Identifier: BSD-3-Clause */
/* nadam.h: the update rule of NAdam, operator by operator as PyTorch's
 * single-tensor implementation on the CPU. */
#ifndef OPTFUSE_RULES_NADAM_H
#define OPTFUSE_RULES_NADAM_H

#include "op_by_op.h"

#define NADAM_STATE(X) X(nadam, exp_avg) X(nadam, exp_avg_sq)
#define NADAM_OPTIONS(X)                                                                           \
    X(nadam, lr) X(nadam, beta1) X(nadam, beta2) X(nadam, eps) X(nadam, weight_decay)              \
    X(nadam, momentum_decay) X(nadam, decoupled_weight_decay) X(nadam, maximize)
/* The number in the optimizer's state that an update changes. */
#define NADAM_COUNTERS(X) X(nadam, mu_product)
OF_ENUMERATE(NADAM);

#define NADAM_ROOTS 1
#define NADAM_VARIANTS(X) X(0)
#define NADAM_SETS(X, ...) X(__VA_ARGS__, 3)

typedef struct nadam_scalars {
    op_by_op_scalars common;
    double shrink; /* what decoupled decay leaves of the parameter */
    double average_weight, beta2, square_weight, correction, eps;
    double grad_step, average_step;
} nadam_scalars;

OF_USES_ALL_STATE(nadam, NADAM)

static inline double nadam_momentum(const double *hyper, double step) {
    return hyper[nadam_beta1] * (1.0 - 0.5 * pow(0.96, step * hyper[nadam_momentum_decay]));
}

static inline void nadam_prepare(const double *hyper, of_count *count, void *scalars) {
    nadam_scalars *s = (nadam_scalars *)scalars;
    const double lr = hyper[nadam_lr], decay = hyper[nadam_weight_decay];
    const bool decoupled = decay != 0.0 && hyper[nadam_decoupled_weight_decay] != 0.0;
    const double mu = nadam_momentum(hyper, count->step);
    const double mu_next = nadam_momentum(hyper, count->step + 1.0);
    double *product = &count->counters[nadam_mu_product];

    *product = op_by_op_number(count->single, *product * op_by_op_number(count->single, mu));
    s->common = op_by_op_prepare(decoupled ? 0.0 : decay, hyper[nadam_maximize], 0);
    s->shrink = decoupled ? 1.0 - lr * decay : 1.0;
    s->average_weight = 1.0 - hyper[nadam_beta1];
    s->beta2 = hyper[nadam_beta2];
    s->square_weight = 1.0 - hyper[nadam_beta2];
    s->correction = 1.0 - pow(hyper[nadam_beta2], count->step);
    s->eps = hyper[nadam_eps];
    s->grad_step = -lr * (1.0 - mu) / (1.0 - *product);
    s->average_step = -lr * mu_next / (1.0 - *product * mu_next);
}

/* Updates the averages of the gradient and of its square; returns the latter. */
OF_RULE_FN of_real nadam_averages(const nadam_scalars *s, of_form form, of_element *e) {
    of_real *average = &e->state[nadam_exp_avg], *square = &e->state[nadam_exp_avg_sq];
    *average = aten_lerp(form, *average, e->grad, s->average_weight);
    *square = aten_mul_number(*square, s->beta2);
    *square = aten_addcmul(form, *square, e->grad, e->grad, s->square_weight);
    return *square;
}

OF_RULE_FN void nadam_radicand(const nadam_scalars *s, unsigned variant, of_form form,
                               of_element *e, of_real *root) {
    (void)variant;
    root[0] = aten_div_number(nadam_averages(s, form, e), s->correction);
}

OF_RULE_FN void nadam_element(const nadam_scalars *s, unsigned variant, of_form form, of_element *e,
                              const of_real *root) {
    const of_real denominator = aten_add_number(root[0], s->eps);
    (void)variant, (void)form;
    e->param = aten_mul_number(e->param, s->shrink);
    e->param = aten_addcdiv(e->param, e->grad, denominator, s->grad_step);
    e->param = aten_addcdiv(e->param, e->state[nadam_exp_avg], denominator, s->average_step);
}

#endif
