// SPDX-License-Identifier: BSD-3-Clause
// trials.h: whether panels of a product have the bits of PyTorch's whole product, and pay.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <mutex>

namespace optfuse {

enum class Verdict {
    UNTRIED,   // compute the whole: it is tried when it has come a few times, or just was
    EQUAL,     // panels have the same bits, and take no more time
    DIFFERENT, // other bits
    SLOWER
};

// dW by PyTorch's operator.
using Whole = std::function<at::Tensor()>;

// For dW = dY' X of matrices with these sizes, strides, offsets and dtype, under the settings of
// this thread and process. May try it here and now, and call `whole` for that, at most once; the
// answer is UNTRIED then, and that is the gradient. Beside it a trial takes some five products, and
// all trials at most a hundredth of the time. forced: at once, with an answer, and never SLOWER.
Verdict try_panels(const at::Tensor &dy, const at::Tensor &x, bool forced, const Whole &whole);

std::mutex &trials_lock(); // held while one runs

} // namespace optfuse
