// SPDX-License-Identifier: BSD-3-Clause
// trials.h: whether panels of a product have the bits of PyTorch's whole product, and pay.
#pragma once

#include <ATen/core/Tensor.h>

#include <mutex>

namespace optfuse {

enum class Verdict {
    UNTRIED,   // compute the whole: it is tried when it has come a few times
    EQUAL,     // panels have the same bits, and take no more time
    DIFFERENT, // other bits
    SLOWER
};

// For dW = dY' X, then cast to `dtype`, of matrices with these sizes, strides, offsets and dtype,
// under the settings of this thread and process. May try it here and now: that takes some ten
// products, and at most a hundredth of the time since the first call. forced: at once, and never
// SLOWER.
Verdict try_panels(const at::Tensor &dy, const at::Tensor &x, at::ScalarType dtype, bool forced);

std::mutex &trials_lock(); // held while one runs

} // namespace optfuse
