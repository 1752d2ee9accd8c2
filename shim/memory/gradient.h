// SPDX-License-Identifier: BSD-3-Clause
// gradient.h: .grad of a parameter, inlined: every update asks for it several times, and PyTorch's
// own way is two calls, one of them virtual.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "base/compat.h"

namespace optfuse {

// Takes the gradient away; undefined: there was none.
inline at::Tensor take_gradient(c10::TensorImpl *param) {
    auto *meta = static_cast<torch::autograd::AutogradMeta *>(autograd_record(param));
    return meta != nullptr ? std::move(meta->grad_) : at::Tensor();
}

// Undefined: there is none.
inline const at::Tensor &gradient_of(const c10::TensorImpl *param) {
    const auto *record = autograd_record(param);
    const auto *meta = static_cast<const torch::autograd::AutogradMeta *>(record);
    return meta != nullptr ? meta->grad_ : param->grad();
}

// Whether this is true of a hook that comes behind the gradient's way into .grad.
template <class Test> bool any_later_hook(c10::TensorImpl *param, const Test &test) {
    const auto *meta = static_cast<torch::autograd::AutogradMeta *>(param->autograd_meta());
    const auto accumulator = meta->grad_accumulator_.lock();
    return accumulator && std::any_of(accumulator->post_hooks().begin(),
                                      accumulator->post_hooks().end(), test);
}

// Whether something is called after autograd has completed the gradient of this parameter, as
// DistributedDataParallel is.
inline bool is_reduced_later(c10::TensorImpl *param) {
    return any_later_hook(param, [](const auto &) { return true; });
}

} // namespace optfuse
