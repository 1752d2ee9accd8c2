/* SPDX-License-Identifier: BSD-3-Clause */
/* nadam_foreach.h: NAdam as PyTorch's multi-tensor implementation has it, its
 * default on GPUs. It takes the root before the bias is corrected. */
#ifndef OPTFUSE_RULES_NADAM_FOREACH_H
#define OPTFUSE_RULES_NADAM_FOREACH_H

#include "nadam.h"

typedef nadam_scalars nadam_foreach_scalars; /* correction: of the root */

static inline void nadam_foreach_prepare(const double *hyper, of_count *count, void *scalars) {
    nadam_foreach_scalars *s = (nadam_foreach_scalars *)scalars;
    nadam_prepare(hyper, count, s);
    s->correction = pow(s->correction, 0.5);
}

OF_RULE_FN void nadam_foreach_radicand(const nadam_foreach_scalars *s, unsigned variant,
                                       of_form form, of_element *e, of_real *root) {
    (void)variant;
    root[0] = nadam_averages(s, form, e);
}

OF_RULE_FN void nadam_foreach_element(const nadam_foreach_scalars *s, unsigned variant,
                                      of_form form, of_element *e, const of_real *root) {
    const of_real corrected = aten_div_number(root[0], s->correction);
    nadam_element(s, variant, form, e, &corrected);
}

#endif
