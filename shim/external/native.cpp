// SPDX-License-Identifier: BSD-3-Clause
// native.cpp: which rules have a native update, and what their state must be like.
#include "external/native.h"

#include <cstring>

namespace optfuse {

NativeUpdate *native_update(const char *rule) {
    static const struct {
        const char *rule;
        NativeUpdate *update;
    } rows[] = {{"adafactor", adafactor}, {"muon", muon}};
    for (const auto &row : rows)
        if (std::strcmp(row.rule, rule) == 0)
            return row.update;
    return nullptr;
}

bool is_usual_state(const at::Tensor &state, const at::Tensor &grad) {
    constexpr c10::DispatchKeySet unusual(
        {c10::DispatchKey::Python, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
    return state.layout() == c10::kStrided && state.device() == grad.device() &&
           state.scalar_type() == grad.scalar_type() && state.is_non_overlapping_and_dense() &&
           !state.is_inference() && !state.key_set().has_any(unusual);
}

} // namespace optfuse
