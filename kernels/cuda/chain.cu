// SPDX-License-Identifier: BSD-3-Clause
// chain.cu: as update.cu, for the rules whose reference is a chain of PyTorch's
// operators. Their scalars are prepared on the host and come where update.cu has
// the options. The build compiles it once per rule and dtype (see
// chain_element.h) and gets two kernels for each set of state that the rule uses.
#include "tensor.cuh"

// What all elements of a block have in common.
struct of_block {
    of_chain chain;
    of_real factor;
    bool multiplied;
};

template <unsigned USED, int N>
OF_DEVICE_FN void of_update_pack(const of_tensor &tensor, const of_block &block, uint64_t at) {
    of_pack<N> param = of_load<N>(tensor.param, at);
    of_pack<N> grad = of_load<N>(tensor.grad, at);
    of_pack<N> state[OF_MAX_STATE];
#pragma unroll
    for (int i = 0; i < OF_MAX_STATE; i++)
        if (USED >> i & 1)
            state[i] = of_load<N>(tensor.state[i], at);
    if (block.multiplied) // as a pass over memory would have left it
#pragma unroll
        for (int lane = 0; lane < N; lane++)
            grad.lane[lane] = of_narrow(of_widen(grad.lane[lane]) * block.factor);
#pragma unroll
    for (int lane = 0; lane < N; lane++) {
        of_element e = {of_widen(param.lane[lane]), of_widen(grad.lane[lane]), {0}};
#pragma unroll
        for (int i = 0; i < OF_MAX_STATE; i++)
            if (USED >> i & 1)
                e.state[i] = of_widen(state[i].lane[lane]);
        of_chain_update(&block.chain, &e);
        param.lane[lane] = of_narrow(e.param);
#pragma unroll
        for (int i = 0; i < OF_MAX_STATE; i++)
            if (USED >> i & 1)
                state[i].lane[lane] = of_narrow(e.state[i]);
    }
    of_store<N>(tensor.param, at, param);
#pragma unroll
    for (int i = 0; i < OF_MAX_STATE; i++)
        if (USED >> i & 1)
            of_store<N>(tensor.state[i], at, state[i]);
}

// One thread's part of a block.
template <unsigned USED>
OF_DEVICE_FN void of_update_block(const of_cuda_common &common, const uint64_t *words) {
    const of_tensor tensor = of_unpack<USED>(of_find<USED>(words, common.entries, blockIdx.x));
    of_block block;
    block.chain = of_chain_round(common.hyper);
    block.multiplied = common.factor_at != nullptr;
    block.factor = block.multiplied ? *static_cast<const of_real *>(common.factor_at) : (of_real)1;
#ifdef OF_RULE_RMSPROP // known here, so that the other ways are left out
    block.chain.scalars.chain.variant =
        (USED & 1 << RMSPROP_MOMENTUM_BUFFER ? RMSPROP_WITH_MOMENTUM : 0) |
        (USED & 1 << RMSPROP_GRAD_AVG ? RMSPROP_WITH_CENTER : 0);
#endif

    uint64_t at = (blockIdx.x - tensor.first_block) * OF_CUDA_CHUNK;
    const uint64_t end = tensor.n - at < OF_CUDA_CHUNK ? tensor.n : at + OF_CUDA_CHUNK;
    if (of_aligned<USED>(tensor, 16)) {
        const uint64_t packed = end - end % OF_LANES;
        for (uint64_t i = at + threadIdx.x * OF_LANES; i < packed; i += blockDim.x * OF_LANES)
            of_update_pack<USED, OF_LANES>(tensor, block, i);
        at = packed;
    }
    for (uint64_t i = at + threadIdx.x; i < end; i += blockDim.x)
        of_update_pack<USED, 1>(tensor, block, i);
}

#define OF_CUDA_NAME(used, size)                                                                   \
    OF_PASTE(OF_PASTE(of_cuda, OF_PASTE(OF_RULE, OF_DTYPE)), OF_PASTE(used, size))
#define OF_CUDA_KERNEL(used, size)                                                                 \
    extern "C" __global__ void __launch_bounds__(OF_CUDA_THREADS)                                  \
        OF_CUDA_NAME(used, size)(OF_CUDA_ARGUMENT(of_cuda_##size##_table) table) {                 \
        of_update_block<used>(table.common, table.words);                                          \
    }
#define OF_CUDA_KERNELS(used) OF_CUDA_KERNEL(used, small) OF_CUDA_KERNEL(used, large)

// The sets of state the rule can use, as bits.
#if defined(OF_RULE_RMSPROP)
OF_CUDA_KERNELS(2)
OF_CUDA_KERNELS(3)
OF_CUDA_KERNELS(6)
OF_CUDA_KERNELS(7)
#elif defined(OF_RULE_ADAGRAD) || defined(OF_RULE_LION)
OF_CUDA_KERNELS(1)
#else
OF_CUDA_KERNELS(3)
#endif
