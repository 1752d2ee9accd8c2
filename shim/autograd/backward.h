// SPDX-License-Identifier: BSD-3-Clause
// backward.h: backward fusion, from a complete gradient to its update.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "optfuse.h"

namespace optfuse {

struct Plan;
struct Slot;

// backward.cpp
bool is_closed(const Plan *plan);
// A parameter's gradient is complete.
void gradient_is_complete(const std::shared_ptr<Plan> &plan, size_t slot, const at::Tensor &param);
// collect()'s part inside backward: OF_FOUND_INPUTS, or what it returns.
of_found look_in_backward(const Slot *slot, c10::TensorImpl *p, const at::Tensor &grad);
extern const of_backward_host backward_host;

// gradient_hook.cpp
void attach_gradient_hook(const std::shared_ptr<Plan> &plan, Slot *slot, const at::Tensor &param);
void detach_gradient_hook(const Plan *plan, const at::Tensor &param);
bool lost_gradient_hook(const Plan *plan, const Slot *slot);
bool has_other_gradient_hook(const Plan *plan, const at::Tensor &param);

} // namespace optfuse
