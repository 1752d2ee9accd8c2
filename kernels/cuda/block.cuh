// SPDX-License-Identifier: BSD-3-Clause
// block.cuh: what a block does whatever the rule: it finds its tensor and takes the
// elements of one chunk, 16 bytes at a time where all arrays are aligned. Who
// includes it defines of_block, of_begin_block() and of_update_pack().
#ifndef OPTFUSE_CUDA_BLOCK_CUH
#define OPTFUSE_CUDA_BLOCK_CUH

#include "tensor.cuh"

// By what the gradient is multiplied first.
struct of_factor {
    of_real by;
    bool given;
};

OF_DEVICE_FN of_factor of_factor_of(const of_cuda_common &common) {
    of_factor factor;
    factor.given = common.factor_at != nullptr;
    factor.by = factor.given ? *static_cast<const of_real *>(common.factor_at) : (of_real)1;
    return factor;
}

// Rounds each product as a store to memory would.
template <int N> OF_DEVICE_FN void of_multiply(of_pack<N> *grad, const of_factor &factor) {
    if (factor.given)
#pragma unroll
        for (int lane = 0; lane < N; lane++)
            grad->lane[lane] = of_narrow(of_widen(grad->lane[lane]) * factor.by);
}

// N elements of all arrays.
template <unsigned USED, int N> struct of_packs {
    of_pack<N> param, grad;
    of_pack<N, of_stored_state> state[OF_FORMULA_STATE];
};

template <unsigned USED, int N>
OF_DEVICE_FN of_packs<USED, N> of_load_packs(const of_tensor &tensor, uint64_t at) {
    of_packs<USED, N> packs;
    packs.param = of_load<N>(tensor.param, at);
    packs.grad = of_load<N>(tensor.grad, at);
#pragma unroll
    for (int i = 0; i < OF_FORMULA_STATE; i++)
        if (USED >> i & 1)
            packs.state[i] = of_load<N>(tensor.state[i], at);
    return packs;
}

// All but the gradient, which an update only reads.
template <unsigned USED, int N>
OF_DEVICE_FN void of_store_packs(const of_tensor &tensor, uint64_t at,
                                 const of_packs<USED, N> &packs) {
    of_store<N>(tensor.param, at, packs.param);
#pragma unroll
    for (int i = 0; i < OF_FORMULA_STATE; i++)
        if (USED >> i & 1)
            of_store<N>(tensor.state[i], at, packs.state[i]);
}

template <unsigned USED, int N>
OF_DEVICE_FN of_element of_get_element(const of_packs<USED, N> &packs, int lane) {
    of_element e = {of_widen(packs.param.lane[lane]), of_widen(packs.grad.lane[lane]), {0}};
#pragma unroll
    for (int i = 0; i < OF_FORMULA_STATE; i++)
        if (USED >> i & 1)
            e.state[i] = of_widen_state(packs.state[i].lane[lane]);
    return e;
}

template <unsigned USED, int N>
OF_DEVICE_FN void of_put_element(of_packs<USED, N> *packs, int lane, const of_element &e) {
    packs->param.lane[lane] = of_narrow(e.param);
#pragma unroll
    for (int i = 0; i < OF_FORMULA_STATE; i++)
        if (USED >> i & 1)
            packs->state[i].lane[lane] = of_narrow_state(e.state[i]);
}

// Numbers that all elements of a block share.
struct of_block;

template <unsigned USED>
OF_DEVICE_FN of_block of_begin_block(const of_cuda_common &common, const of_tensor &tensor);

// Updates N elements.
template <unsigned USED, int N>
OF_DEVICE_FN void of_update_pack(const of_tensor &tensor, const of_block &block, uint64_t at);

// The part of a tensor that a block works on.
struct of_part {
    of_tensor tensor;
    uint64_t begin, end; // its elements
};

template <unsigned USED>
OF_DEVICE_FN of_part of_part_of(const of_cuda_common &common, const uint64_t *words) {
    of_part part;
    part.tensor = of_unpack<USED>(of_find<USED>(words, common.entries, blockIdx.x));
    const uint64_t begin = (blockIdx.x - part.tensor.first_block) * common.chunk;
    part.begin = begin;
    part.end = part.tensor.n - begin < common.chunk ? part.tensor.n : begin + common.chunk;
    return part;
}

// One thread's part of a block.
template <unsigned USED>
OF_DEVICE_FN void of_update_block(const of_cuda_common &common, const uint64_t *words) {
    if (common.found_inf_at && *common.found_inf_at == 1.0f)
        return;
    const of_part part = of_part_of<USED>(common, words);
    const of_tensor &tensor = part.tensor;
    const auto block = of_begin_block<USED>(common, tensor);
    uint64_t at = part.begin;
    const uint64_t end = part.end;
    if (of_aligned<USED>(tensor, 16)) {
        const uint64_t packed = end - end % OF_LANES;
        for (uint64_t i = at + threadIdx.x * OF_LANES; i < packed; i += blockDim.x * OF_LANES)
            of_update_pack<USED, OF_LANES>(tensor, block, i);
        at = packed;
    }
    for (uint64_t i = at + threadIdx.x; i < end; i += blockDim.x)
        of_update_pack<USED, 1>(tensor, block, i);
}

// The kernels for one set of state, as bits; the build defines OF_SETS: those that the rule
// can use.
#define OF_CUDA_NAME(rule, used, size)                                                             \
    OF_PASTE(OF_PASTE(of_cuda, OF_PASTE(rule, OF_DTYPE)), OF_PASTE(used, size))
#define OF_CUDA_KERNEL(rule, used, size, update)                                                   \
    extern "C" __global__ void __launch_bounds__(OF_CUDA_THREADS)                                  \
        OF_CUDA_NAME(rule, used, size)(OF_CUDA_ARGUMENT(of_cuda_##size##_table) table) {                 \
        update<used>(table.common, table.words);                                                   \
    }
#define OF_CUDA_KERNELS(rule, used)                                                                \
    OF_CUDA_KERNEL(rule, used, small, of_update_block)                                             \
    OF_CUDA_KERNEL(rule, used, large, of_update_block)

#endif
