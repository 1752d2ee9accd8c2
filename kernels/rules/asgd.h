/* SPDX-License-Identifier: BSD-3-Clause */
/* asgd.h: the update rule of ASGD, operator by operator as PyTorch's
 * single-tensor implementation on the CPU. */
#ifndef OPTFUSE_RULES_ASGD_H
#define OPTFUSE_RULES_ASGD_H

#include "op_by_op.h"

#define ASGD_STATE(X) X(asgd, ax)
#define ASGD_OPTIONS(X)                                                                            \
    X(asgd, lr) X(asgd, lambd) X(asgd, alpha) X(asgd, t0) X(asgd, weight_decay) X(asgd, maximize)
/* Numbers in the optimizer's state that an update changes: for the next. */
#define ASGD_COUNTERS(X) X(asgd, eta) X(asgd, mu)
OF_ENUMERATE(ASGD);

/* While mu is 1 the average is a copy of the parameter. */
enum { ASGD_WITH_AVERAGE = 1 };
#define ASGD_ROOTS 0
#define ASGD_VARIANTS(X) X(0) X(1)
#define ASGD_SETS(X, ...) X(__VA_ARGS__, 1)

typedef struct asgd_scalars {
    op_by_op_scalars common;
    double shrink, step_size, mu;
} asgd_scalars;

OF_USES_ALL_STATE(asgd, ASGD)

static inline void asgd_advance(const double *hyper, of_count *count) {
    const double late = count->step - hyper[asgd_t0];
    const double growth = 1.0 + hyper[asgd_lambd] * hyper[asgd_lr] * count->step;
    const double eta = hyper[asgd_lr] / pow(growth, hyper[asgd_alpha]);
    const double mu = 1.0 / (late > 1.0 ? late : 1.0);
    const bool single = count->single || count->made_single;
    count->counters[asgd_eta] = op_by_op_number(single, eta);
    count->counters[asgd_mu] = op_by_op_number(single, mu);
}

static inline void asgd_prepare(const double *hyper, of_count *count, void *scalars) {
    asgd_scalars *s = (asgd_scalars *)scalars;
    const double eta = count->counters[asgd_eta];
    s->mu = count->counters[asgd_mu];
    s->common = op_by_op_prepare(hyper[asgd_weight_decay], hyper[asgd_maximize],
                             s->mu != 1.0 ? (unsigned)ASGD_WITH_AVERAGE : 0u);
    s->shrink = 1.0 - hyper[asgd_lambd] * eta;
    s->step_size = -eta;
    asgd_advance(hyper, count);
}

OF_RULE_FN void asgd_element(const asgd_scalars *s, unsigned variant, of_form form, of_element *e,
                             const of_real *root) {
    of_real *average = &e->state[asgd_ax];
    (void)root;
    e->param = aten_mul_number(e->param, s->shrink);
    e->param = aten_add(form, e->param, e->grad, s->step_size);
    if (variant & ASGD_WITH_AVERAGE) {
        const of_real way = aten_add(form, e->param, *average, -1.0);
        *average = aten_add(form, *average, aten_mul_number(way, s->mu), 1.0);
    } else {
        *average = e->param;
    }
}

#endif
