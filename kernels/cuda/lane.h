/* SPDX-License-Identifier: BSD-3-Clause */
/* lane.h: how PyTorch's fused CUDA kernels deal out a tensor's elements. */
#ifndef OPTFUSE_CUDA_LANE_H
#define OPTFUSE_CUDA_LANE_H

#include <stdint.h>

#include "../rules/real.h"

/* The one of the four elements that a thread of the reference takes at once that element `at` is.
 * In fours they lie side by side, else a block of threads apart (MultiTensorApply.cuh). */
OF_RULE_FN unsigned of_cuda_lane(bool quad, uint64_t at) {
    enum { THREADS = 512 };
    return (unsigned)((quad ? at : at / THREADS) % 4);
}

#endif
