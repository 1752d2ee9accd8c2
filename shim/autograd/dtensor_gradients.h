// SPDX-License-Identifier: BSD-3-Clause
// dtensor_gradients.h: DTensor parameters. A slot has the local tensor of one, whose .grad is lent
// while the library looks: the local tensor of the DTensor's gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "plan/plan.h"

namespace optfuse {

// .grad of these slots' parameters, one tensor for each; none: they have none.
void lend_gradients(Plan &plan, const std::vector<size_t> &slots,
                    const std::vector<at::Tensor> &grads);
// And in forward mode, where others that are lent may use the same memory.
void know_gradients(Plan &plan, const std::vector<size_t> &slots,
                    const std::vector<at::Tensor> &grads);
// The DTensors of a slot's parameter and state, which the caller keeps alive.
void set_wrappers(Slot &slot, const std::vector<at::Tensor> &wrappers);
// It has none any more. stepped: of a step(); the write of its update was the DTensor's, too.
void take_gradient_back(Slot &slot, bool stepped);
// None of these slots has a gradient any more, unless it is a consumed one.
void take_gradients_back(Plan &plan, const std::vector<size_t> &slots);
// Backward mode: these gradients are complete, one for each slot. siblings: other tensors that
// are known to use their memory; some may be the same. only_kept: whoever has the tensors that
// they are views of never writes to these. Updates that can run have run afterwards.
void complete_gradients(Plan &plan, const std::vector<size_t> &slots,
                        const std::vector<at::Tensor> &grads,
                        const std::vector<at::Tensor> &siblings, bool only_kept);
// The slot's update has used the gradient of its DTensor, which becomes consumed_wrapper. False: others
// have that, or there is none.
bool consume(Slot &slot);
void consume_by(Slot &slot, const at::Tensor &wrapper); // that is consumed, and becomes it
// Tensors beside the slot's parameter that are known to use its memory.
void set_aliases(Slot &slot, const std::vector<at::Tensor> &candidates);

} // namespace optfuse
