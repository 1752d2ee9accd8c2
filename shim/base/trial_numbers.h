// SPDX-License-Identifier: BSD-3-Clause
// trial_numbers.h: random numbers for trials, whatever PyTorch's generators do and without changing
// their states.
#pragma once

#include <cstdint>

namespace optfuse {

// A sequence that begins with its seed: Knuth's linear congruential generator for MMIX.
class Draws {
  public:
    explicit Draws(uint64_t seed = 1) : state_(seed) {}
    double next() { // from -1 to 1
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return static_cast<double>(static_cast<int64_t>(state_ >> 11)) / (1LL << 52) - 1;
    }

  private:
    uint64_t state_;
};

} // namespace optfuse
