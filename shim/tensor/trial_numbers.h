// SPDX-License-Identifier: BSD-3-Clause
// trial_numbers.h: random numbers for trials, whatever PyTorch's generators do and without changing
// their states.
#pragma once

#include <cstdint>

namespace optfuse {

// The next of a sequence that begins with its seed, from -1 to 1: the linear congruential generator
// of Numerical Recipes.
inline float next_trial_number(uint32_t *random) {
    *random = *random * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int32_t>(*random)) / 2147483648.0f;
}

} // namespace optfuse
