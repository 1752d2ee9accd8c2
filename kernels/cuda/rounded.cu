// SPDX-License-Identifier: BSD-3-Clause
// rounded.cu: as update.cu, for the rules that round once (../rules/rounded.h). Their scalars are
// prepared on the host and come where update.cu has the options.
//
// 16 threads, its lanes, take a chunk of draws (../rules/draws.h): each makes the integers of its
// lane and updates the elements that they are of, 16 apart. So no integer goes from one thread to
// another, a tensor may begin anywhere, and all elements of a thread are on their way from memory
// together.
#include "block.cuh"

struct of_block {
    OF_RULE_NAME(constants) constants;
    rounded_scalars common;
    of_factor factor;
};

template <unsigned USED>
OF_DEVICE_FN of_block of_begin_block(const of_cuda_common &common, const of_tensor &tensor) {
    of_block block;
    (void)tensor;
    block.constants = OF_RULE_NAME(round)(common.hyper, of_form());
    memcpy(&block.common, common.hyper, sizeof block.common);
    block.factor = of_factor_of(common);
    return block;
}

OF_DEVICE_FN of_real of_get(const float *from) {
    return *from;
}

OF_DEVICE_FN void of_put(float *to, of_real value, bool stochastic, uint32_t draw) {
    (void)stochastic, (void)draw;
    *to = value;
}

#ifdef OF_IS_NARROW
OF_DEVICE_FN of_real of_get(const of_stored *from) {
    return of_widen(*from);
}

OF_DEVICE_FN void of_put(of_stored *to, of_real value, bool stochastic, uint32_t draw) {
    *to = stochastic ? OF_STOCHASTIC(value, draw) : of_narrow(value);
}
#endif

// The part of a lane's words that an element of this row has.
OF_DEVICE_FN uint32_t of_draw_of(const uint32_t *words, int row) {
    const uint32_t word = words[row / OF_HALVES];
    return OF_HALVES == 1 ? word : word >> row % OF_HALVES * 16 & 0xffffu;
}

// The state lies as State.
template <typename State> OF_DEVICE_FN State *of_state(const of_tensor &tensor, int i) {
    return reinterpret_cast<State *>(tensor.state[i]);
}

// A lane of a chunk, of which the elements in [from, to) are this block's.
template <typename State>
OF_DEVICE_FN void of_update_lane(const of_tensor &tensor, const of_block &block, uint64_t chunk,
                                 unsigned lane, uint64_t from, uint64_t to) {
    const rounded_scalars &s = block.common;
    const uint64_t first = chunk * OF_CHUNK + lane;
    of_element e[OF_ROWS];
#pragma unroll
    for (int row = 0; row < OF_ROWS; row++) {
        const uint64_t at = first + row * OF_DRAW_LANES;
        e[row] = of_element();
        if (at < from || at >= to)
            continue;
        e[row].param = of_get(tensor.param + at);
        e[row].grad = of_get(tensor.grad + at);
#pragma unroll
        for (int i = 0; i < OF_N_STATE; i++)
            e[row].state[i] = of_get(of_state<State>(tensor, i) + at);
    }
    uint32_t words[1 + OF_N_STATE][OF_DRAW_WORDS] = {};
#pragma unroll
    for (int stream = 0; stream <= OF_N_STATE; stream++)
        if (stream ? s.state : s.param)
            of_draw_lane(words[stream], chunk * OF_DRAW_LANES + lane,
                         of_key_of_stream(s.seed, s.step, tensor.step >> 32, stream));
#pragma unroll
    for (int row = 0; row < OF_ROWS; row++) {
        const uint64_t at = first + row * OF_DRAW_LANES;
        if (at < from || at >= to)
            continue;
        if (block.factor.given)
            e[row].grad = of_widen(of_narrow(e[row].grad * block.factor.by));
        OF_RULE_NAME(element)(&block.constants, 0, of_form(), &e[row]);
        of_put(tensor.param + at, e[row].param, s.param, of_draw_of(words[0], row));
#pragma unroll
        for (int i = 0; i < OF_N_STATE; i++)
            of_put(of_state<State>(tensor, i) + at, e[row].state[i], s.state,
                   of_draw_of(words[1 + i], row));
    }
}

template <unsigned USED>
OF_DEVICE_FN void of_round_block(const of_cuda_common &common, const uint64_t *words) {
    const of_part part = of_part_of<USED>(common, words);
    const of_block block = of_begin_block<USED>(common, part.tensor);
    const unsigned lane = threadIdx.x % OF_DRAW_LANES, lanes = blockDim.x / OF_DRAW_LANES;
    uint64_t chunk = part.begin / OF_CHUNK + threadIdx.x / OF_DRAW_LANES;
    for (; chunk * OF_CHUNK < part.end; chunk += lanes)
        if (common.wide_state)
            of_update_lane<float>(part.tensor, block, chunk, lane, part.begin, part.end);
        else
            of_update_lane<of_stored>(part.tensor, block, chunk, lane, part.begin, part.end);
}

#define OF_ROUNDED_KERNELS(rule, used)                                                             \
    OF_CUDA_KERNEL(rule, used, small, of_round_block)                                              \
    OF_CUDA_KERNEL(rule, used, large, of_round_block)

OF_SETS(OF_ROUNDED_KERNELS, OF_RULE)
