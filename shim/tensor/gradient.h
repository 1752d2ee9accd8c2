// SPDX-License-Identifier: BSD-3-Clause
// gradient.h: .grad of a parameter, inlined: every update asks for it several times, and PyTorch's
// own way is two calls, one of them virtual.
#pragma once

#include <torch/csrc/autograd/variable.h>

namespace optfuse {

// Undefined: there is none.
inline const at::Tensor &gradient_of(const c10::TensorImpl *param) {
    const auto *meta = static_cast<const torch::autograd::AutogradMeta *>(param->autograd_meta());
    return meta != nullptr ? meta->grad_ : param->grad();
}

} // namespace optfuse
