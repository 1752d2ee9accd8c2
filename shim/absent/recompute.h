// SPDX-License-Identifier: BSD-3-Clause
// recompute.h: forward passes inside of backward, as activation checkpointing makes them. In stock
// they read the weights of the first forward pass, since step() comes later; backward fusion may
// have updated some by then.
#pragma once

#include <c10/core/TensorImpl.h>

#include <string>

#include "fence.h"

namespace optfuse {

// While this thread makes a forward pass once more: the name of the parameter or state with this
// memory that backward fusion has updated since step(). Else empty.
std::string updated_too_early(const c10::TensorImpl *impl);

bool is_recomputing_here();

// Whether any thread does.
bool any_recomputes();

// Whether marks behind which nothing is pending have to stay for now.
inline bool marks_stay() { return of_marks_stay() || any_recomputes(); }

} // namespace optfuse
