// SPDX-License-Identifier: BSD-3-Clause
// first_use.h: the fallback that launches a pending update when its tensors are used, and
// which threads use them.
#pragma once

#include "memory/absent.h"

namespace optfuse {

struct Plan;

int register_first_use();
// The fallback's work. Its tensors' numbers are there when the operator runs, if that needs them.
void use_marked(const OperatorCall &call);
// of_access() or of_launch_at() for what is pending on this tensor's memory, or for the update
// that the tensor stands for (proxies.h). Before of_access() numbers that are absent are made.
of_accessed use_memory(const c10::TensorImpl *impl, bool foreign,
                       decltype(&of_access) how = of_access);
void note_stepping_thread(); // that steps, or multiplies gradients before a step

// Whether this is a moment when marks may be taken off other tensors than the one that is used.
bool may_take_marks_off(const Plan *plan);

} // namespace optfuse
