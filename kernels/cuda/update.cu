// SPDX-License-Identifier: BSD-3-Clause
// update.cu: updates many tensors in one launch. The build compiles it once per
// rule and dtype (see ../cpu/instance.h for the macros) and gets two kernels for
// each set of state that the rule uses: for a small and a large table.
//
// A block works on one chunk of one tensor. It finds the tensor by a binary
// search over the tensors' first blocks, so nothing but the tensors themselves
// has to be in the table, and that is in the kernel's arguments.
#include "block.cuh"
#include "lane.h"
#include "step_scalars.cuh"

struct of_block {
    OF_RULE_NAME(cuda_constants) constants;
    of_factor factor;
    of_real grad_scale;
    bool scaled;
    bool quad; // the reference takes this tensor in fours
};

template <unsigned USED>
OF_DEVICE_FN of_block of_begin_block(const of_cuda_common &common, const of_tensor &tensor) {
    const of_step_scalars now = of_step_scalars_of(common, tensor.step);
    of_block block;
    block.constants = OF_RULE_NAME(cuda_round)(common.hyper, &now);
    block.factor = of_factor_of(common);
    block.scaled = now.scaled;
    block.grad_scale = now.scaled ? (of_real)*common.grad_scale_at : (of_real)1;
    block.quad = tensor.n % 4 == 0 && of_aligned<USED>(tensor, 4 * sizeof(of_stored));
    return block;
}

template <unsigned USED, int N>
OF_DEVICE_FN void of_update_pack(const of_tensor &tensor, const of_block &block, uint64_t at) {
    of_packs<USED, N> packs = of_load_packs<USED, N>(tensor, at);
    of_multiply(&packs.grad, block.factor);
#pragma unroll
    for (int lane = 0; lane < N; lane++) {
        of_element e = of_get_element(packs, lane);
        if (block.scaled) {
            e.grad = e.grad / block.grad_scale;
            packs.grad.lane[lane] = of_narrow(e.grad);
        }
        OF_RULE_NAME(cuda_element)
        (&block.constants, USED, block.quad, of_cuda_lane(block.quad, at + lane), &e);
        of_put_element(&packs, lane, e);
    }
    of_store_packs(tensor, at, packs);
    if (block.scaled)
        of_store<N>(tensor.grad, at, packs.grad);
}

OF_SETS(OF_CUDA_KERNELS, OF_RULE)
