// SPDX-License-Identifier: BSD-3-Clause
// asgd_next.cu: the numbers of each parameter that ASGD keeps on the device, for the next
// update. A kernel of its own, because all blocks of an update read them.
#include "table.h"

#include "../rules/asgd_next.h"

extern "C" __global__ void of_cuda_asgd_next(OF_CUDA_ARGUMENT(of_cuda_numbers) numbers) {
    const uint64_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= numbers.n)
        return;
    const asgd_schedule of = {numbers.lr, numbers.growth, numbers.alpha, numbers.t0};
    const float step = *numbers.at[i].step + 1.0f;
    *numbers.at[i].eta = asgd_next_eta(&of, step);
    *numbers.at[i].mu = asgd_next_mu(&of, step);
}
