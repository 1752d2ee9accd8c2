/* SPDX-License-Identifier: BSD-3-Clause */
/* adamw.h: the update rule of optfuse.optim.AdamW: AdamW ("Decoupled Weight Decay Regularization",
 * arXiv 1711.05101, algorithm 2) in float32 throughout. torch.optim's is adam.h. */
#ifndef OPTFUSE_RULES_ADAMW_H
#define OPTFUSE_RULES_ADAMW_H

#include "rounded.h"

#define ADAMW_STATE(X) X(adamw, exp_avg) X(adamw, exp_avg_sq)
#define ADAMW_OPTIONS(X)                                                                           \
    X(adamw, lr) X(adamw, beta1) X(adamw, beta2) X(adamw, eps) X(adamw, weight_decay)              \
    X(adamw, maximize) OF_ROUNDED_OPTIONS(X, adamw)
#define ADAMW_COUNTERS(X)
OF_ENUMERATE(ADAMW);

#define ADAMW_VARIANTS(X) X(0)
#define ADAMW_SETS(X, ...) X(__VA_ARGS__, 3)
/* shrink: what decay leaves of the parameter. correction, eps: of the root. */
#define ADAMW_NUMBERS(X)                                                                           \
    X(shrink) X(beta1) X(weight1) X(beta2) X(weight2) X(correction) X(eps) X(step_size) X(sign)
OF_ROUNDED_NUMBERS(adamw, ADAMW_NUMBERS);

OF_USES_ALL_STATE(adamw, ADAMW)

static inline void adamw_prepare(const double *hyper, of_count *count, void *scalars) {
    adamw_scalars *s = (adamw_scalars *)scalars;
    const double lr = hyper[adamw_lr];
    s->common = rounded_prepare(hyper + adamw_stochastic_rounding, count->step);
    s->shrink = 1.0 - lr * hyper[adamw_weight_decay];
    s->beta1 = hyper[adamw_beta1];
    s->weight1 = 1.0 - s->beta1;
    s->beta2 = hyper[adamw_beta2];
    s->weight2 = 1.0 - s->beta2;
    s->correction = 1.0 / sqrt(1.0 - pow(s->beta2, count->step));
    s->eps = hyper[adamw_eps];
    s->step_size = -lr / (1.0 - pow(s->beta1, count->step));
    s->sign = hyper[adamw_maximize] != 0.0 ? -1.0 : 1.0;
}

OF_RULE_FN void adamw_element(const adamw_constants *k, unsigned variant, of_form form,
                              of_element *e) {
    of_real *average = &e->state[adamw_exp_avg], *square = &e->state[adamw_exp_avg_sq];
    const of_real grad = e->grad * k->sign;
    (void)variant, (void)form;
    *average = *average * k->beta1 + grad * k->weight1;
    *square = *square * k->beta2 + grad * grad * k->weight2;
    const of_real denominator = of_square_root(*square) * k->correction + k->eps;
    e->param = e->param * k->shrink + *average / denominator * k->step_size;
}

#endif
