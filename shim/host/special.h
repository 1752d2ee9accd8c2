// SPDX-License-Identifier: BSD-3-Clause
// special.h: the inputs of an update where something is special about one of its tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "optfuse.h"

namespace optfuse {

struct Plan;
struct Slot;

// Does all of collect()'s work, for whatever tensors; refuses those that can't be updated. Nothing
// of what is in *in counts. Throws where something that is pending on the tensors fails.
of_found collect_special(Plan *plan, Slot *slot, const at::Tensor &grad, of_inputs *in);

} // namespace optfuse
