/* SPDX-License-Identifier: BSD-3-Clause */
/* nadam_foreach.h: NAdam as PyTorch's multi-tensor implementation has it, its
 * default on GPUs. It takes the root before the bias is corrected. */
#ifndef OPTFUSE_RULES_NADAM_FOREACH_H
#define OPTFUSE_RULES_NADAM_FOREACH_H

#include "nadam.h"

typedef struct nadam_foreach_scalars {
    op_by_op_scalars common;
    double shrink; /* what decoupled decay leaves of the parameter */
    double average_weight, beta2, square_weight, root_correction, eps;
    double grad_step, average_step;
} nadam_foreach_scalars;

static inline void nadam_foreach_prepare(const double *hyper, of_count *count, void *scalars) {
    nadam_foreach_scalars *s = (nadam_foreach_scalars *)scalars;
    nadam_scalars single;
    nadam_prepare(hyper, count, &single);
    s->common = single.common;
    s->shrink = single.shrink;
    s->average_weight = single.average_weight;
    s->beta2 = single.beta2;
    s->square_weight = single.square_weight;
    s->root_correction = pow(single.correction, 0.5);
    s->eps = single.eps;
    s->grad_step = single.grad_step;
    s->average_step = single.average_step;
}

OF_RULE_FN void nadam_foreach_radicand(const nadam_foreach_scalars *s, unsigned variant,
                                       of_form form, of_element *e, of_real *root) {
    of_real *average = &e->state[nadam_exp_avg], *square = &e->state[nadam_exp_avg_sq];
    (void)variant;
    *average = aten_lerp(form, *average, e->grad, s->average_weight);
    *square = aten_mul_number(*square, s->beta2);
    *square = aten_addcmul(form, *square, e->grad, e->grad, s->square_weight);
    root[0] = *square;
}

OF_RULE_FN void nadam_foreach_element(const nadam_foreach_scalars *s, unsigned variant,
                                      of_form form, of_element *e, const of_real *root) {
    const of_real corrected = aten_div_number(root[0], s->root_correction);
    const of_real denominator = aten_add_number(corrected, s->eps);
    (void)variant, (void)form;
    e->param = aten_mul_number(e->param, s->shrink);
    e->param = aten_addcdiv(e->param, e->grad, denominator, s->grad_step);
    e->param = aten_addcdiv(e->param, e->state[nadam_exp_avg], denominator, s->average_step);
}

#endif
