// SPDX-License-Identifier: BSD-3-Clause
// backward.h: backward fusion, from a complete gradient to its update.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "optfuse.h"

namespace optfuse {

struct Plan;
struct Slot;

// backward.cpp
bool is_closed(const Plan *plan);
// A parameter's gradient is complete.
void gradient_is_complete(const std::shared_ptr<Plan> &plan, size_t slot, const at::Tensor &param);
// .grad of these slots becomes a part of a flat buffer, in which they are reduced: until its
// update, or the end of the pass. offsets: in elements. False: this pass only adds to the
// gradients, and nothing was done.
bool take_parts(const std::shared_ptr<Plan> &plan, const std::vector<Slot *> &slots,
                const at::Tensor &bucket, const std::vector<int64_t> &offsets);
// Copies such a part to .grad of a parameter.
void give_part(const at::Tensor &param, const at::Tensor &bucket, int64_t offset);
// The gradients of several slots are complete, after their reduction between processes if
// Slot::reduced. The caller leaves them alone until then: none waits afterwards. With no slots
// the pass has begun, and counts. param: one of the plan's.
void gradients_are_complete(const std::shared_ptr<Plan> &plan, const std::vector<size_t> &slots,
                            const at::Tensor &param);
// The host of a plan in backward mode.
void update_in_backward(of_host *host);
void update_in_hooks(of_host *host); // in final mode

// gradient_hook.cpp
// Ours, of every parameter of the plan, in the order of its slots.
void attach(Plan &plan, const std::vector<at::Tensor> &params);
void detach_gradient_hook(const Plan *plan, const at::Tensor &param);
bool has_lost_gradient_hook(const Plan &plan); // someone has put another in its place

} // namespace optfuse
