// SPDX-License-Identifier: BSD-3-Clause
// update.cu: updates many tensors in one launch. The build compiles it once per
// rule and dtype (see ../cpu/instance.h for the macros) and gets four kernels:
// with and without the optional state, for a small and a large table.
//
// A block works on one chunk of one tensor. It finds the tensor by a binary
// search over the tensors' first blocks, so nothing but the tensors themselves
// has to be in the table, and that is in the kernel's arguments.
#include "moment.cuh"
#include "tensor.cuh"

typedef OF_RULE_NAME(cuda_constants) of_cuda_constants;

// What all elements of a block have in common.
struct of_block {
    of_cuda_constants constants;
    of_real factor;
    bool multiplied;
    of_real grad_scale;
    bool scaled;
    bool quad; // the reference takes this tensor in fours
};

template <unsigned USED, int N>
OF_DEVICE_FN void of_update_pack(const of_tensor &tensor, const of_block &block, uint64_t at) {
    of_pack<N> param = of_load<N>(tensor.param, at), grad = of_load<N>(tensor.grad, at);
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
        if (block.scaled) {
            e.grad = e.grad / block.grad_scale;
            grad.lane[lane] = of_narrow(e.grad);
        }
#pragma unroll
        for (int i = 0; i < OF_MAX_STATE; i++)
            if (USED >> i & 1)
                e.state[i] = of_widen(state[i].lane[lane]);
        OF_RULE_NAME(cuda_element)
        (&block.constants, USED, block.quad, static_cast<unsigned>((at + lane) % 4), &e);
        param.lane[lane] = of_narrow(e.param);
#pragma unroll
        for (int i = 0; i < OF_MAX_STATE; i++)
            if (USED >> i & 1)
                state[i].lane[lane] = of_narrow(e.state[i]);
    }
    of_store<N>(tensor.param, at, param);
    if (block.scaled)
        of_store<N>(tensor.grad, at, grad);
#pragma unroll
    for (int i = 0; i < OF_MAX_STATE; i++)
        if (USED >> i & 1)
            of_store<N>(tensor.state[i], at, state[i]);
}

// One thread's part of a block.
template <unsigned USED>
OF_DEVICE_FN void of_update_block(const of_cuda_common &common, const uint64_t *words) {
    if (common.found_inf_at && *common.found_inf_at == 1.0f)
        return;
    const of_tensor tensor = of_unpack<USED>(of_find<USED>(words, common.entries, blockIdx.x));
    const of_moment now = of_moment_of(common, tensor.step);
    of_block block;
    block.constants = OF_RULE_NAME(cuda_round)(common.hyper, &now);
    block.multiplied = common.factor_at != nullptr;
    block.factor = block.multiplied ? *static_cast<const of_real *>(common.factor_at) : (of_real)1;
    block.scaled = now.scaled;
    block.grad_scale = now.scaled ? (of_real)*common.grad_scale_at : (of_real)1;
    block.quad = tensor.n % 4 == 0 && of_aligned<USED>(tensor, 4 * sizeof(of_stored));

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

#define OF_CUDA_KERNELS(least, most)                                                               \
    OF_CUDA_KERNEL(least, small)                                                                   \
    OF_CUDA_KERNEL(least, large)                                                                   \
    OF_CUDA_KERNEL(most, small)                                                                    \
    OF_CUDA_KERNEL(most, large)

// The sets of state a rule can use, as bits.
#if defined(OF_RULE_ADAM)
OF_CUDA_KERNELS(3, 7)
#elif defined(OF_RULE_SCALING)
OF_CUDA_KERNEL(0, small)
OF_CUDA_KERNEL(0, large)
#elif defined(OF_RULE_SGD)
OF_CUDA_KERNELS(0, 1)
#else
#error "define OF_RULE_<NAME>"
#endif
