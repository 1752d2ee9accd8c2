/* SPDX-License-Identifier: BSD-3-Clause */
/* scaling.h: multiplies gradients by a factor that is on a GPU, where somebody
 * looks at one that clipping has left unwritten. Not an update rule, but the same
 * loop over many tensors: the parameter becomes the gradient, which the loop has
 * multiplied. On the CPU scale.h does this. */
#ifndef OPTFUSE_RULES_SCALING_H
#define OPTFUSE_RULES_SCALING_H

#include "real.h"

#define SCALING_SETS(X, ...) X(__VA_ARGS__, 0)

typedef struct scaling_constants {
    bool none;
} scaling_constants;

typedef scaling_constants scaling_cuda_constants;

enum { scaling_narrow_is_scalar = 0, scaling_cuda_corrects = 0 };

static inline unsigned scaling_state_used(const double *hyper) {
    (void)hyper;
    return 0;
}

OF_RULE_FN scaling_cuda_constants scaling_cuda_round(const double *hyper, const of_step_scalars *now) {
    const scaling_cuda_constants k = {false};
    (void)hyper;
    (void)now;
    return k;
}

OF_RULE_FN void scaling_cuda_element(const scaling_cuda_constants *k, unsigned used, bool quad,
                                     unsigned lane, of_element *e) {
    (void)k;
    (void)used;
    (void)quad;
    (void)lane;
    e->param = e->grad;
}

#endif
