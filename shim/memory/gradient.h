// SPDX-License-Identifier: BSD-3-Clause
// gradient.h: .grad of a parameter, inlined: every update asks for it several times, and PyTorch's
// own way is two calls, one of them virtual.
#pragma once

#include <torch/csrc/autograd/variable.h>

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

} // namespace optfuse
