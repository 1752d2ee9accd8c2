// SPDX-License-Identifier: BSD-3-Clause
// consumed.h: what .grad holds in backward mode after the update.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

namespace optfuse {

at::Tensor make_consumed(const at::Tensor &param);
// Whether C++ code that asks for the address of one gets an error, or a null pointer.
void seal_consumed(bool sealed);
bool is_consumed(const c10::TensorImpl *impl);
// A DTensor reads as a consumed gradient from here on. local: its local tensor, which is one.
void consume_wrapper(const at::Tensor &wrapper, const at::Tensor &local);
// Answers an operator that received a consumed gradient: real zeros for zero_(), an error for
// what reads numbers. True: convert_consumed() gives its result.
bool answer_consumed(const char *op, c10::TensorImpl *impl);
// aten::_to_copy: its copy on another device or in another dtype is consumed, too.
void convert_consumed(torch::jit::Stack *stack);

} // namespace optfuse
