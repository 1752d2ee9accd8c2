// SPDX-License-Identifier: BSD-3-Clause
// native.cpp: which classes have a native update, and what their state must be like.
#include "native/native.h"

namespace optfuse {

NativeUpdate *native_update(const std::string &name) {
    return name == "adafactor" ? adafactor : name == "muon" ? muon : nullptr;
}

bool is_usual_state(const at::Tensor &state, const at::Tensor &grad) {
    constexpr c10::DispatchKeySet unusual(
        {c10::DispatchKey::Python, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
    return state.layout() == c10::kStrided && state.device() == grad.device() &&
           state.scalar_type() == grad.scalar_type() && state.is_non_overlapping_and_dense() &&
           !state.is_inference() && !state.key_set().has_any(unusual);
}

} // namespace optfuse
