// SPDX-License-Identifier: BSD-3-Clause
// tensor.cuh: the tensor that a block works on, found in the table. A bit of USED
// is set for each state that takes part.
#ifndef OPTFUSE_CUDA_TENSOR_CUH
#define OPTFUSE_CUDA_TENSOR_CUH

#include "element.cuh"
#include "table.h"

// Numbers that each tensor has of its own, on the device.
#ifdef OF_RULE_ASGD
enum { OF_NUMBERS = ASGD_N_COUNTERS };
#else
enum { OF_NUMBERS = 0 };
#endif

// The tensor of one entry.
struct of_tensor {
    of_stored *param;
    of_stored *grad;
    of_stored_state *state[OF_MAX_STATE];
    const float *number[OF_MAX_COUNTERS];
    uint64_t n;
    uint64_t step; // a word, see table.h
    uint64_t first_block;
};

template <unsigned BITS> struct of_count_of {
    enum { COUNT = (BITS & 1) + of_count_of<(BITS >> 1)>::COUNT };
};
template <> struct of_count_of<0> {
    enum { COUNT = 0 };
};

template <unsigned USED> struct of_words {
    enum { STATES = of_count_of<USED>::COUNT };
    enum { STRIDE = OF_CUDA_WORDS_BESIDE_STATE + STATES + OF_NUMBERS };
};

// The last entry whose first block is not after this one.
template <unsigned USED>
OF_DEVICE_FN const uint64_t *of_find(const uint64_t *words, uint32_t entries, uint64_t block) {
    enum { STRIDE = of_words<USED>::STRIDE };
    uint32_t low = 0, high = entries;
    while (high - low > 1) {
        const uint32_t middle = low + (high - low) / 2;
        if (words[middle * STRIDE + STRIDE - 1] <= block)
            low = middle;
        else
            high = middle;
    }
    return words + low * STRIDE;
}

template <unsigned USED> OF_DEVICE_FN of_tensor of_unpack(const uint64_t *words) {
    of_tensor tensor;
    tensor.param = reinterpret_cast<of_stored *>(*words++);
    tensor.grad = reinterpret_cast<of_stored *>(*words++);
#pragma unroll
    for (int i = 0; i < OF_MAX_STATE; i++)
        tensor.state[i] = USED >> i & 1 ? reinterpret_cast<of_stored_state *>(*words++) : nullptr;
#pragma unroll
    for (int i = 0; i < OF_MAX_COUNTERS; i++)
        tensor.number[i] = i < OF_NUMBERS ? reinterpret_cast<const float *>(*words++) : nullptr;
    tensor.step = *words++;
    tensor.n = *words++;
    tensor.first_block = *words;
    return tensor;
}

// Whether all arrays of the tensor lie at multiples of `bytes`; those of a state whose elements are
// smaller, at multiples of as many elements.
template <unsigned USED> OF_DEVICE_FN bool of_aligned(const of_tensor &tensor, unsigned bytes) {
    enum { SMALLER = sizeof(of_stored) / sizeof(of_stored_state) };
    uint64_t all =
        reinterpret_cast<uint64_t>(tensor.param) | reinterpret_cast<uint64_t>(tensor.grad);
#pragma unroll
    for (int i = 0; i < OF_MAX_STATE; i++)
        if (USED >> i & 1)
            all |= reinterpret_cast<uint64_t>(tensor.state[i]) * SMALLER;
    return all % bytes == 0;
}

#endif
