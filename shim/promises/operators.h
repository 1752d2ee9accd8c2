// SPDX-License-Identifier: BSD-3-Clause
// operators.h: operators for which a promise is no look, or which make one. The fallback for
// pending tensors (tensor/first_use.cpp) asks here with the operator's name and stack.
#pragma once

#include <ATen/core/stack.h>

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
// Behind it, with its output on the stack: has autograd's node ask for a promise.
void ask_in_backward(const std::shared_ptr<PromisingLayer> &layer, const at::Tensor &output);

} // namespace optfuse
