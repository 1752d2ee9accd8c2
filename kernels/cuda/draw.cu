// SPDX-License-Identifier: BSD-3-Clause
// draw.cu: the integers of stochastic rounding (../rules/draws.h), for updates by operators. A
// thread makes those of a lane.
#include "../gpu_update.h"
#include "../rules/draws.h"
#include "table.h"

extern "C" __global__ void of_cuda_draw_integers(OF_CUDA_ARGUMENT(of_gpu_draws) draws) {
    const uint64_t chunk = draws.first >> of_draw_shift(draws.halves);
    const uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const uint64_t block = chunk * OF_DRAW_LANES + i, lane = block % OF_DRAW_LANES;
    const uint64_t begin = block / OF_DRAW_LANES << of_draw_shift(draws.halves);
    const of_draw_key key = {draws.seed, draws.step, draws.parameter};
    uint32_t words[OF_DRAW_WORDS];
    of_draw_lane(words, block, key);
#pragma unroll
    for (unsigned word = 0; word < OF_DRAW_WORDS; word++)
        for (unsigned half = 0; half < draws.halves; half++) {
            const uint64_t row = word * draws.halves + half;
            const uint64_t at = begin + row * OF_DRAW_LANES + lane;
            if (at >= draws.first && at - draws.first < draws.n)
                draws.to[at - draws.first] =
                    draws.halves == 1 ? words[word] : words[word] >> half * 16 & 0xffffu;
        }
}
