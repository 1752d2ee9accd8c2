/* SPDX-License-Identifier: BSD-3-Clause */
/* asgd.h: the update rule of ASGD, operator by operator as PyTorch's
 * single-tensor implementation on the CPU. */
#ifndef OPTFUSE_RULES_ASGD_H
#define OPTFUSE_RULES_ASGD_H

#include "chain.h"

enum { ASGD_AX, ASGD_N_STATE };

enum { ASGD_LR, ASGD_LAMBD, ASGD_ALPHA, ASGD_T0, ASGD_WEIGHT_DECAY, ASGD_MAXIMIZE, ASGD_N_HYPER };

/* The numbers in the optimizer's state that an update changes: for the next. */
enum { ASGD_ETA, ASGD_MU, ASGD_N_COUNTERS };

/* Before that the average is the parameter. */
enum { ASGD_WITH_AVERAGE = 1 };
#define ASGD_VARIANTS(X) X(0) X(1)

typedef struct asgd_scalars {
    chain_scalars chain;
    double shrink, step_size, mu;
} asgd_scalars;

OF_RULE_FN unsigned asgd_variant_state(unsigned variant) {
    (void)variant;
    return 1u;
}

static inline unsigned asgd_state_used(const double *hyper) {
    (void)hyper;
    return 1u;
}

static inline void asgd_advance(const double *hyper, of_count *count) {
    const double late = count->step - hyper[ASGD_T0];
    const double growth = 1.0 + hyper[ASGD_LAMBD] * hyper[ASGD_LR] * count->step;
    const double eta = hyper[ASGD_LR] / pow(growth, hyper[ASGD_ALPHA]);
    const double mu = 1.0 / (late > 1.0 ? late : 1.0);
    const bool single = count->single || count->made_single;
    count->counters[ASGD_ETA] = chain_number(single, eta);
    count->counters[ASGD_MU] = chain_number(single, mu);
}

static inline void asgd_prepare(const double *hyper, of_count *count, void *scalars) {
    asgd_scalars *s = (asgd_scalars *)scalars;
    const double eta = count->counters[ASGD_ETA];
    s->mu = count->counters[ASGD_MU];
    s->chain = chain_prepare(hyper[ASGD_WEIGHT_DECAY], hyper[ASGD_MAXIMIZE],
                             s->mu != 1.0 ? (unsigned)ASGD_WITH_AVERAGE : 0u);
    s->shrink = 1.0 - hyper[ASGD_LAMBD] * eta;
    s->step_size = -eta;
    asgd_advance(hyper, count);
}

OF_RULE_FN void asgd_element(const asgd_scalars *s, unsigned variant, of_form form, of_element *e,
                             const of_real *root) {
    of_real *average = &e->state[ASGD_AX];
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
