// SPDX-License-Identifier: BSD-3-Clause
// late_norm.h: the 2-norm of gradients of which some are promises. Where a bound on it tells that
// clipping changes no gradient, nobody computes them, and the norm's number is absent, too, until
// somebody looks at it. When a promise is computed, by anybody, each norm that is alive and waits
// for it gets its part, so that nobody keeps a gradient's factors for a number alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include "base/pinned.h"
#include "memory/absent.h"
#include "norm.h"

namespace optfuse {

// The norm of these tensors, all of float32, with PyTorch's bits; undefined: it has to be computed
// now, since no tensor is absent, one is no gradient that can be read here, or nothing bounds it.
at::Tensor late_norm(const std::vector<const at::Tensor *> &of);
// It is finite and at most this, if nobody has looked at it so far; none: it is no such norm.
std::optional<float> most_of(const at::Tensor &norm);

bool is_norm_waiting(const Computable *numbers);
// Gives the norms that wait for them their part.
void note_computed(const Computable *numbers, const void *memory);

// Finds the norm of numbers that come in parts, by several threads, for the norms that wait.
class PartedNorm : Pinned {
  public:
    explicit PartedNorm(const Computable *of) : of_(of) {}
    // Numbers [first, first + n), of whole vectors but for the last ones. Waits until those before
    // have come. Null: they can't be computed, so there will be no norm.
    void add(const void *numbers, int64_t first, int64_t n);

  private:
    static constexpr int64_t FAILED = -1;
    const Computable *const of_;
    std::atomic<int64_t> next_{0};
    float sums_[OF_NORM_SUMS] = {}; // written by whose turn it is
};

void make_all_norms();
std::mutex &norms_lock(); // so that a fork can take it

namespace absent {
extern const Absent late_norm;
} // namespace absent

} // namespace optfuse
