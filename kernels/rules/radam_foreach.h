/* SPDX-License-Identifier: BSD-3-Clause */
/* radam_foreach.h: RAdam as PyTorch's multi-tensor implementation has it, its
 * default on GPUs. It puts all factors of the running average into one number an
 * element, the same way with and without rectification. */
#ifndef OPTFUSE_RULES_RADAM_FOREACH_H
#define OPTFUSE_RULES_RADAM_FOREACH_H

#include "radam.h"

typedef struct radam_foreach_scalars {
    op_by_op_scalars common;
    double shrink; /* what decoupled decay leaves of the parameter */
    double average_weight, beta2, square_weight, eps;
    double divisor; /* of the root; a zero without rectification */
    double offset;  /* the step without rectification; a zero with it */
} radam_foreach_scalars;

static inline void radam_foreach_prepare(const double *hyper, of_count *count, void *scalars) {
    radam_foreach_scalars *s = (radam_foreach_scalars *)scalars;
    radam_scalars single;
    radam_prepare(hyper, count, &single);
    const double unrectified = single.rectification > 0.0 ? 0.0 : 1.0;
    s->common = single.common;
    s->shrink = single.shrink;
    s->average_weight = single.average_weight;
    s->beta2 = single.beta2;
    s->square_weight = single.square_weight;
    s->eps = single.eps;
    s->divisor =
        -(single.root_correction2 * (single.lr * single.rectification / single.correction1));
    s->offset = -(single.lr * unrectified / single.correction1);
}

OF_RULE_FN void radam_foreach_radicand(const radam_foreach_scalars *s, unsigned variant,
                                       of_form form, of_element *e, of_real *root) {
    of_real *average = &e->state[radam_exp_avg], *square = &e->state[radam_exp_avg_sq];
    (void)variant;
    *average = aten_lerp(form, *average, e->grad, s->average_weight);
    *square = aten_mul_number(*square, s->beta2);
    *square = aten_addcmul(form, *square, e->grad, e->grad, s->square_weight);
    root[0] = *square;
}

OF_RULE_FN void radam_foreach_element(const radam_foreach_scalars *s, unsigned variant,
                                      of_form form, of_element *e, const of_real *root) {
    of_real factor = aten_add_number(root[0], s->eps);
    (void)variant;
    factor = aten_div_number(factor, s->divisor);
    factor = aten_div((of_real)1, factor);
    factor = aten_add_number(factor, s->offset);
    e->param = aten_mul_number(e->param, s->shrink);
    e->param = aten_addcmul(form, e->param, e->state[radam_exp_avg], factor, 1.0);
}

#endif
