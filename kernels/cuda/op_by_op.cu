// SPDX-License-Identifier: BSD-3-Clause
// op_by_op.cu: as update.cu, for the rules whose reference is PyTorch's operators, one
// after the other. Their scalars are prepared on the host and come where update.cu has
// the options. The build compiles it once per rule and dtype (see
// op_by_op_element.h).
#include "block.cuh"

struct of_block {
    of_op_by_op update;
    of_factor factor;
};

template <unsigned USED>
OF_DEVICE_FN of_block of_begin_block(const of_cuda_common &common, const of_tensor &tensor) {
    of_block block;
    block.update = of_op_by_op_round(common.hyper);
    block.factor = of_factor_of(common);
#ifdef OF_RULE_RMSPROP // known here, so that the other ways are left out
    block.update.scalars.common.variant =
        (USED & 1 << rmsprop_momentum_buffer ? RMSPROP_WITH_MOMENTUM : 0) |
        (USED & 1 << rmsprop_grad_avg ? RMSPROP_WITH_CENTER : 0);
#endif
#ifdef OF_RULE_ASGD
    asgd_foreach_meet(&block.update.scalars, *tensor.number[asgd_eta], *tensor.number[asgd_mu]);
#else
    (void)tensor;
#endif
    return block;
}

template <unsigned USED, int N>
OF_DEVICE_FN void of_update_pack(const of_tensor &tensor, const of_block &block, uint64_t at) {
    of_packs<USED, N> packs = of_load_packs<USED, N>(tensor, at);
    of_multiply(&packs.grad, block.factor);
#pragma unroll
    for (int lane = 0; lane < N; lane++) {
        of_element e = of_get_element(packs, lane);
        of_op_by_op_update(&block.update, &e);
        of_put_element(&packs, lane, e);
    }
    of_store_packs(tensor, at, packs);
}

OF_SETS(OF_CUDA_KERNELS, OF_RULE)
