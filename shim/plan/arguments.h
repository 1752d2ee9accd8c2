// SPDX-License-Identifier: BSD-3-Clause
// arguments.h: plans and slots by the numbers that Python passes to operators.
#pragma once

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <string>

#include "base/error.h"
#include "plan/plan.h"

namespace optfuse {

// The address of an of_shim_plan.
inline Plan &plan_at(int64_t address) {
    return *reinterpret_cast<Plan *>(address);
}

inline Slot &slot_at(Plan &plan, int64_t index) {
    if (index < 0 || static_cast<size_t>(index) >= plan.slots.size())
        fail("optfuse: no parameter number " + std::to_string(index));
    return *plan.slots[static_cast<size_t>(index)];
}

// Traced, they would come with tensors that have no numbers, and that the plan must not keep.
inline void refuse_fake_tensors(const char *what) {
    using Modes = c10::impl::TorchDispatchModeTLS;
    if (Modes::get_mode(c10::impl::TorchDispatchModeKey::FAKE).has_value())
        fail(std::string("optfuse: ") + what +
             " inside code that is traced (torch.compile, torch.export or a "
             "FakeTensorMode), where tensors are fake; nothing was changed. Call "
             "optimizer.step() and functions of optfuse outside of it");
}

} // namespace optfuse
