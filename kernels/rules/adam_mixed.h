/* SPDX-License-Identifier: BSD-3-Clause */
/* adam_mixed.h: Adam and AdamW on GPUs for float32 parameters and gradients whose state is
 * bfloat16, as PyTorch's fused CUDA kernel takes them from 2.12 on (FusedAdamMathFunctorMP of
 * fused_adam_utils.cuh). Not an optimizer of its own: the formula is that of adam.h in float. The
 * state is widened and rounded once, and the corrections come rounded from double (stored.h,
 * cuda/step_scalars.cuh). */
#ifndef OPTFUSE_RULES_ADAM_MIXED_H
#define OPTFUSE_RULES_ADAM_MIXED_H

#include "adam.h"

#define ADAM_MIXED_SETS ADAM_SETS

typedef adam_constants adam_mixed_constants;
typedef adam_cuda_constants adam_mixed_cuda_constants;

enum { adam_mixed_narrow_is_scalar = 0, adam_mixed_cuda_corrects = adam_cuda_corrects };

OF_RULE_FN unsigned adam_mixed_cuda_state(const double *hyper) {
    return adam_cuda_state(hyper);
}

OF_RULE_FN adam_mixed_cuda_constants adam_mixed_cuda_round(const double *hyper,
                                                           const of_step_scalars *now) {
    return adam_cuda_round(hyper, now);
}

OF_RULE_FN void adam_mixed_cuda_element(const adam_mixed_cuda_constants *k, unsigned used,
                                        bool quad, unsigned lane, of_element *e) {
    adam_cuda_element(k, used, quad, lane, e);
}

#endif
