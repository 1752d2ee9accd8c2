/* SPDX-License-Identifier: BSD-3-Clause */
/* radam.h: the update rule of RAdam, operator by operator as PyTorch's
 * single-tensor implementation on the CPU. */
#ifndef OPTFUSE_RULES_RADAM_H
#define OPTFUSE_RULES_RADAM_H

#include "op_by_op.h"

#define RADAM_STATE(X) X(radam, exp_avg) X(radam, exp_avg_sq)
#define RADAM_OPTIONS(X)                                                                           \
    X(radam, lr) X(radam, beta1) X(radam, beta2) X(radam, eps) X(radam, weight_decay)              \
    X(radam, decoupled_weight_decay) X(radam, maximize)
#define RADAM_COUNTERS(X)
OF_ENUMERATE(RADAM);

/* After the first few updates the variance is rectified. */
enum { RADAM_WITH_RECTIFICATION = 1 };
#define RADAM_ROOTS 1
#define RADAM_VARIANTS(X) X(0) X(1)
#define RADAM_SETS(X, ...) X(__VA_ARGS__, 3)

typedef struct radam_scalars {
    op_by_op_scalars common;
    double shrink; /* what decoupled decay leaves of the parameter */
    double lr, average_weight, beta2, square_weight, eps;
    double correction1, root_correction2, rectification;
} radam_scalars;

OF_USES_ALL_STATE(radam, RADAM)

/* 0 as long as the variance can't be rectified. Powers of 0.5 as the reference
 * takes them. */
static inline double radam_rectification(double beta2, double step) {
    const double longest = 2.0 / (1.0 - beta2) - 1.0;
    const double power = pow(beta2, step);
    const double length = longest - 2.0 * step * power / (1.0 - power);
    if (!(length > 5.0))
        return 0.0;
    return pow((length - 4.0) * (length - 2.0) * longest /
                   ((longest - 4.0) * (longest - 2.0) * length),
               0.5);
}

static inline void radam_prepare(const double *hyper, of_count *count, void *scalars) {
    radam_scalars *s = (radam_scalars *)scalars;
    const double decay = hyper[radam_weight_decay], beta2 = hyper[radam_beta2];
    const bool decoupled = decay != 0.0 && hyper[radam_decoupled_weight_decay] != 0.0;

    s->rectification = radam_rectification(beta2, count->step);
    s->common = op_by_op_prepare(decoupled ? 0.0 : decay, hyper[radam_maximize],
                             s->rectification != 0.0 ? (unsigned)RADAM_WITH_RECTIFICATION : 0u);
    s->lr = hyper[radam_lr];
    s->shrink = decoupled ? 1.0 - s->lr * decay : 1.0;
    s->average_weight = 1.0 - hyper[radam_beta1];
    s->beta2 = beta2;
    s->square_weight = 1.0 - beta2;
    s->eps = hyper[radam_eps];
    s->correction1 = 1.0 - pow(hyper[radam_beta1], count->step);
    s->root_correction2 = pow(1.0 - pow(beta2, count->step), 0.5);
}

OF_RULE_FN void radam_radicand(const radam_scalars *s, unsigned variant, of_form form,
                               of_element *e, of_real *root) {
    of_real *average = &e->state[radam_exp_avg], *square = &e->state[radam_exp_avg_sq];
    (void)variant;
    *average = aten_lerp(form, *average, e->grad, s->average_weight);
    *square = aten_mul_number(*square, s->beta2);
    *square = aten_addcmul(form, *square, e->grad, e->grad, s->square_weight);
    root[0] = *square;
}

/* A number divided by a tensor is the tensor's reciprocal times the number. */
OF_RULE_FN of_real radam_adaptive_lr(const radam_scalars *s, of_real root) {
    const of_real reciprocal = aten_div((of_real)1, aten_add_number(root, s->eps));
    return aten_mul_number(reciprocal, s->root_correction2);
}

OF_RULE_FN void radam_element(const radam_scalars *s, unsigned variant, of_form form, of_element *e,
                              const of_real *root) {
    of_real update = aten_div_number(e->state[radam_exp_avg], s->correction1);
    update = aten_mul_number(update, s->lr);
    if (variant & RADAM_WITH_RECTIFICATION) {
        update = aten_mul(update, radam_adaptive_lr(s, root[0]));
        update = aten_mul_number(update, s->rectification);
    }
    e->param = aten_mul_number(e->param, s->shrink);
    e->param = aten_add(form, e->param, update, -1.0);
}

#endif
