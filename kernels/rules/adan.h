/* SPDX-License-Identifier: BSD-3-Clause */
/* adan.h: the update rule of Adan ("Adan: Adaptive Nesterov Momentum Algorithm for Faster
 * Optimizing Deep Models", arXiv 2208.06677, algorithm 1), operator by operator as
 * optfuse.optim.Adan. */
#ifndef OPTFUSE_RULES_ADAN_H
#define OPTFUSE_RULES_ADAN_H

#include "op_by_op.h"

#define ADAN_STATE(X)                                                                              \
    X(adan, exp_avg) X(adan, exp_avg_diff) X(adan, exp_avg_sq) X(adan, previous_grad)
#define ADAN_OPTIONS(X)                                                                            \
    X(adan, lr) X(adan, beta1) X(adan, beta2) X(adan, beta3) X(adan, eps) X(adan, weight_decay)    \
    X(adan, no_prox) X(adan, maximize)
#define ADAN_COUNTERS(X)
OF_ENUMERATE(ADAN);

/* FIRST: there is no previous gradient. PROX: decay comes last, as in the paper. */
enum { ADAN_WITH_FIRST = 1, ADAN_WITH_PROX = 2 };
#define ADAN_ROOTS 1
#define ADAN_VARIANTS(X) X(0) X(1) X(2) X(3)
#define ADAN_SETS(X, ...) X(__VA_ARGS__, 15)

typedef struct adan_scalars {
    op_by_op_scalars common;
    double beta1, weight1, beta2, weight2, beta3, weight3;
    double correction, eps;      /* of the root */
    double step_size, diff_step; /* of the two averages */
    double shrink;               /* what decay leaves of the parameter */
} adan_scalars;

OF_USES_ALL_STATE(adan, ADAN)

static inline void adan_prepare(const double *hyper, of_count *count, void *scalars) {
    adan_scalars *s = (adan_scalars *)scalars;
    const double lr = hyper[adan_lr], decay = lr * hyper[adan_weight_decay];
    const bool prox = hyper[adan_no_prox] == 0.0;
    s->common = op_by_op_prepare(0.0, hyper[adan_maximize],
                                 (count->step <= 1.0 ? (unsigned)ADAN_WITH_FIRST : 0u) |
                                     (prox ? (unsigned)ADAN_WITH_PROX : 0u));
    s->beta1 = hyper[adan_beta1];
    s->weight1 = 1.0 - s->beta1;
    s->beta2 = hyper[adan_beta2];
    s->weight2 = 1.0 - s->beta2;
    s->beta3 = hyper[adan_beta3];
    s->weight3 = 1.0 - s->beta3;
    s->correction = 1.0 / sqrt(1.0 - pow(s->beta3, count->step));
    s->eps = hyper[adan_eps];
    s->step_size = -lr / (1.0 - pow(s->beta1, count->step));
    s->diff_step = -lr * s->beta2 / (1.0 - pow(s->beta2, count->step));
    s->shrink = prox ? 1.0 / (1.0 + decay) : 1.0 - decay;
}

OF_RULE_FN of_real adan_average(of_form form, of_real average, double beta, of_real next,
                                double weight) {
    return aten_add(form, aten_mul_number(average, beta), next, weight);
}

OF_RULE_FN void adan_radicand(const adan_scalars *s, unsigned variant, of_form form, of_element *e,
                              of_real *root) {
    of_real *average = &e->state[adan_exp_avg], *difference = &e->state[adan_exp_avg_diff];
    of_real *square = &e->state[adan_exp_avg_sq], *previous = &e->state[adan_previous_grad];
    const bool first = (variant & ADAN_WITH_FIRST) != 0;
    const of_real change = first ? (of_real)0 : aten_add(form, e->grad, *previous, -1.0);
    const of_real ahead = aten_add(form, e->grad, change, s->beta2);
    *average = adan_average(form, *average, s->beta1, e->grad, s->weight1);
    *difference = adan_average(form, *difference, s->beta2, change, s->weight2);
    *square = adan_average(form, *square, s->beta3, aten_mul(ahead, ahead), s->weight3);
    *previous = e->grad;
    root[0] = *square;
}

OF_RULE_FN void adan_element(const adan_scalars *s, unsigned variant, of_form form, of_element *e,
                             const of_real *root) {
    const of_real corrected = aten_mul_number(root[0], s->correction);
    const of_real denominator = aten_add_number(corrected, s->eps);
    const of_real average = aten_div(e->state[adan_exp_avg], denominator);
    const of_real difference = aten_div(e->state[adan_exp_avg_diff], denominator);
    if (!(variant & ADAN_WITH_PROX))
        e->param = aten_mul_number(e->param, s->shrink);
    e->param = aten_add(form, e->param, average, s->step_size);
    e->param = aten_add(form, e->param, difference, s->diff_step);
    if (variant & ADAN_WITH_PROX)
        e->param = aten_mul_number(e->param, s->shrink);
}

#endif
