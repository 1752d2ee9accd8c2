// SPDX-License-Identifier: BSD-3-Clause
// step_scalars.cuh: the scalars of one update as the reference computes them on the
// device: learning rate and step may live there, and powers are CUDA's own.
#ifndef OPTFUSE_CUDA_STEP_SCALARS_CUH
#define OPTFUSE_CUDA_STEP_SCALARS_CUH

#include <string.h>

#include "../rules/adam.h"
#include "element.cuh"
#include "table.h"

OF_DEVICE_FN float of_step(const of_cuda_common &common, uint64_t word) {
    if (common.steps_on_device)
        return *reinterpret_cast<const float *>(word) + 1.0f; // it is counted behind the update
#ifdef __CUDACC__
    return __uint_as_float(static_cast<unsigned>(word));
#else
    return of_float_of_bits(static_cast<uint32_t>(word));
#endif
}

// The type in which biases are corrected: that of the computation, but double where the state is
// bfloat16 (FusedAdamMathFunctorMP of fused_adam_utils.cuh).
#ifdef OF_STATE_BFLOAT16
typedef double of_correcting;
#else
typedef of_real of_correcting;
#endif

// 1 - beta^step: powf or pow of CUDA's library.
OF_DEVICE_FN of_correcting of_correction(double beta, float step) {
    return (of_correcting)1 - ::pow((of_correcting)beta, (of_correcting)step);
}

OF_DEVICE_FN of_step_scalars of_step_scalars_of(const of_cuda_common &common, uint64_t step_word) {
    const float step = of_step(common, step_word);
    of_step_scalars now;
    // Every rule has its learning rate first.
    now.lr = common.lr_at ? (of_real)*common.lr_at : (of_real)common.hyper[0];
    now.correction1 = now.correction2 = (of_real)1;
    if (OF_RULE_NAME(cuda_corrects)) {
        now.correction1 = (of_real)of_correction(common.hyper[adam_beta1], step);
        now.correction2 = (of_real)::sqrt(of_correction(common.hyper[adam_beta2], step));
    }
    now.first = step <= 1.0f;
    now.scaled = common.grad_scale_at != nullptr;
    now.narrow = OF_NARROW;
    now.early = common.early;
    return now;
}

#endif
