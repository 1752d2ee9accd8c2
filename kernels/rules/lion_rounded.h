/* SPDX-License-Identifier: BSD-3-Clause */
/* lion_rounded.h: the update rule of optfuse.optim.Lion(stochastic_rounding=True): lion.h's in float32
 * throughout. */
#ifndef OPTFUSE_RULES_LION_ROUNDED_H
#define OPTFUSE_RULES_LION_ROUNDED_H

#include "rounded.h"

#define LION_ROUNDED_STATE(X) X(lion_rounded, exp_avg)
#define LION_ROUNDED_OPTIONS(X)                                                                    \
    X(lion_rounded, lr) X(lion_rounded, beta1) X(lion_rounded, beta2)                              \
    X(lion_rounded, weight_decay) X(lion_rounded, maximize) OF_ROUNDED_OPTIONS(X, lion_rounded)
#define LION_ROUNDED_COUNTERS(X)
OF_ENUMERATE(LION_ROUNDED);

#define LION_ROUNDED_VARIANTS(X) X(0)
#define LION_ROUNDED_SETS(X, ...) X(__VA_ARGS__, 1)
/* shrink: what decay leaves of the parameter */
#define LION_ROUNDED_NUMBERS(X)                                                                    \
    X(shrink) X(beta1) X(weight1) X(beta2) X(weight2) X(step_size) X(sign)
OF_ROUNDED_NUMBERS(lion_rounded, LION_ROUNDED_NUMBERS);

OF_USES_ALL_STATE(lion_rounded, LION_ROUNDED)

static inline void lion_rounded_prepare(const double *hyper, of_count *count, void *scalars) {
    lion_rounded_scalars *s = (lion_rounded_scalars *)scalars;
    s->common = rounded_prepare(hyper + lion_rounded_stochastic_rounding, count->step);
    s->shrink = 1.0 - hyper[lion_rounded_lr] * hyper[lion_rounded_weight_decay];
    s->beta1 = hyper[lion_rounded_beta1];
    s->weight1 = 1.0 - s->beta1;
    s->beta2 = hyper[lion_rounded_beta2];
    s->weight2 = 1.0 - s->beta2;
    s->step_size = -hyper[lion_rounded_lr];
    s->sign = hyper[lion_rounded_maximize] != 0.0 ? -1.0 : 1.0;
}

OF_RULE_FN void lion_rounded_element(const lion_rounded_constants *k, unsigned variant,
                                     of_form form, of_element *e) {
    of_real *average = &e->state[lion_rounded_exp_avg];
    const of_real grad = e->grad * k->sign;
    const of_real update = *average * k->beta1 + grad * k->weight1;
    const of_real way = (of_real)(update > (of_real)0) - (of_real)(update < (of_real)0);
    (void)variant, (void)form;
    e->param = e->param * k->shrink + way * k->step_size;
    *average = *average * k->beta2 + grad * k->weight2;
}

#endif
