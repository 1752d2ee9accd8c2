// SPDX-License-Identifier: BSD-3-Clause
// advance.cu: counts a step on the device. A kernel of its own, because all
// blocks of an update read the count.
#include "table.h"

extern "C" __global__ void of_cuda_advance_steps(OF_CUDA_ARGUMENT(of_cuda_steps) steps) {
    const uint64_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= steps.n)
        return;
    const float step = *steps.step[i] + 1.0f;
    *steps.step[i] = steps.less_at ? step - *steps.less_at : step;
}
