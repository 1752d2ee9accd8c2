// SPDX-License-Identifier: BSD-3-Clause
// consumed.h: what .grad holds in backward mode after the update.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "plan/plan.h"

namespace optfuse {

at::Tensor make_consumed(const at::Tensor &param, std::shared_ptr<const Steps> steps);
// It stands for the gradient of a later backward pass from here on, unless it has memory again.
// Returns the number of this use, which no other gradient of the process has; or kNoUse.
uint64_t consume_again(const c10::TensorImpl *impl);
// Whether it, or an alias, is what consume_again() has said so of, with all digits: no gradient of
// another parameter or an earlier step.
bool is_of_use(const c10::TensorImpl *impl, uint64_t use);
// The local tensor of a DTensor that reads as one; everything else as it is.
const at::Tensor &local_gradient(const at::Tensor &gradient);
// Whether there are others with its memory, as .data and detach() are.
bool has_aliases(const c10::TensorImpl *impl);
// Whether C++ code that asks for the address of one gets an error, or a null pointer.
void seal_consumed(bool sealed);
bool consumed_are_sealed(); // else a profiler notes addresses
bool is_consumed(const c10::TensorImpl *impl);
// A DTensor reads as a consumed gradient from here on. local: its local tensor, which is one.
void consume_wrapper(const at::Tensor &wrapper, const at::Tensor &local);

} // namespace optfuse
