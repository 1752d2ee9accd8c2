// SPDX-License-Identifier: BSD-3-Clause
// operators.h: operators that take a promise without computing it, or that make one. The fallback for
// pending tensors (host/first_use.cpp) asks here with the operator's name and stack.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <memory>

namespace optfuse {

class PromisingLayer;

// If autograd casts a promise on its way, adds one to another, or computes the gradient of an
// embedding that may be promised: puts the promise in the place of the arguments. False: go on as
// ever.
bool answer_with_promise(const char *op, torch::jit::Stack *stack, size_t n);

// The layer, if the operator is aten::embedding of a weight whose gradient may be promised, with
// settings under which it can be; else null.
std::shared_ptr<PromisingLayer> promising_embedding(const char *op, const torch::jit::Stack &stack,
                                                    size_t n);
// Behind it, with its output: has autograd's node ask for a promise.
void ask_behind_embedding(const std::shared_ptr<PromisingLayer> &layer, const at::Tensor &output);
// The same behind at::linear() of this weight, which has recorded nodes with this number and above.
void ask_behind_linear(const std::shared_ptr<PromisingLayer> &layer, const at::Tensor &output,
                       const at::Tensor &weight, uint64_t first_node);

// Whether the operator leaves the mark on this tensor: where autograd puts a promise into .grad,
// and where a node that asks for one uses its dY.
bool is_no_look(const char *op, const c10::TensorImpl *impl);
// Whether such a node, or at::linear()'s behind it, transposes dY or the promise. What it makes
// stays marked; behind it, with its output.
bool transposes_in_backward(const char *op, const torch::jit::Stack &stack, size_t n);
void note_transposed(const at::Tensor &output);
// If it is the product for the weight, which may be promised: puts the promise in the place of the
// arguments, which nothing is pending on any more. False: go on as ever.
bool answer_product_with_promise(const char *op, torch::jit::Stack *stack, size_t n);

} // namespace optfuse
