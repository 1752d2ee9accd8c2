/* SPDX-License-Identifier: BSD-3-Clause */
/* asgd_foreach.h: ASGD as PyTorch's multi-tensor implementation has it, its default on
 * GPUs. There a parameter's step counter, eta and mu are tensors on the device: an
 * update reads the two numbers where they are, and afterwards they are made anew. */
#ifndef OPTFUSE_RULES_ASGD_FOREACH_H
#define OPTFUSE_RULES_ASGD_FOREACH_H

#include "asgd.h"

typedef struct asgd_foreach_scalars {
    op_by_op_scalars common;
    double lambd;
    double eta, mu;               /* a kernel takes them from the device instead */
    double lr, growth, alpha, t0; /* for the next eta and mu; growth: lambd * lr */
} asgd_foreach_scalars;

static inline void asgd_foreach_prepare(const double *hyper, of_count *count, void *scalars) {
    asgd_foreach_scalars *s = (asgd_foreach_scalars *)scalars;
    s->common = op_by_op_prepare(hyper[asgd_weight_decay], hyper[asgd_maximize], 0);
    s->lambd = hyper[asgd_lambd];
    s->eta = count->counters[asgd_eta];
    s->mu = count->counters[asgd_mu];
    s->lr = hyper[asgd_lr];
    s->growth = hyper[asgd_lambd] * hyper[asgd_lr];
    s->alpha = hyper[asgd_alpha];
    s->t0 = hyper[asgd_t0];
}

/* A tensor without dimensions is converted to the dtype of those that it meets. */
OF_RULE_FN void asgd_foreach_meet(asgd_foreach_scalars *s, double eta, double mu) {
    s->eta = (double)aten_round((of_real)eta);
    s->mu = (double)aten_round((of_real)mu);
}

OF_RULE_FN void asgd_foreach_element(const asgd_foreach_scalars *s, unsigned variant, of_form form,
                                     of_element *e, const of_real *root) {
    of_real *average = &e->state[asgd_ax];
    const of_real slope = aten_add(form, e->grad, e->param, s->lambd);
    (void)variant, (void)root;
    e->param = aten_addcmul(form, e->param, slope, (of_real)s->eta, -1.0);
    const of_real way = aten_add(form, e->param, *average, -1.0);
    *average = aten_addcmul(form, *average, way, (of_real)s->mu, 1.0);
}

#endif
