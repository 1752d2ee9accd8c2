// SPDX-License-Identifier: BSD-3-Clause
// usual.h: the inputs of the update that nearly every parameter has.
#pragma once

#include <ATen/core/Tensor.h>

#include "optfuse.h"

namespace optfuse {

struct Slot;

// Does all of collect()'s work for a slot of a rule with kernels whose tensors are dense, laid out
// alike and alone in memory that PyTorch has allocated. False, with nothing taken: something is
// special about one of them, and collect.cpp knows what that means. May launch what is pending on
// the tensors; throws where that fails.
bool collect_usual(Slot *slot, c10::TensorImpl *p, const at::Tensor &grad, of_inputs *in);

} // namespace optfuse
