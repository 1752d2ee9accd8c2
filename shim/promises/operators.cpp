// SPDX-License-Identifier: BSD-3-Clause
// operators.cpp: see operators.h. An embedding's node has no room for an output of ours, but its
// formula is one operator, which is ours to answer where its argument is marked: so a hook of the
// node marks an alias of dY.
#include "promises/operators.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstring>
#include <utility>

#include "compat.h"
#include "layers/layer.h"
#include "promises/layer.h"
#include "promises/promise.h"
#include "tensor/memory.h"
#include "tensor/plain_mode.h"
#include "tensor/threads.h"

namespace optfuse {
namespace {

using torch::autograd::variable_list;
using torch::autograd::generated::EmbeddingBackward0;
using torch::jit::Stack;

constexpr size_t kArgumentsOfTo = 8; // of aten::to.dtype_layout
constexpr size_t kArgumentsOfAdd = 3;
constexpr size_t kArgumentsOfEmbedding = 5;
constexpr size_t kArgumentsOfItsBackward = 6;

bool is_in_backward() {
    return torch::autograd::get_current_graph_task_id() != -1;
}

// As autocast's node calls it for a weight's gradient. Anything but another dtype is a look.
bool changes_dtype_only(const c10::TensorImpl *impl, const Stack &stack) {
    const auto given = [&stack](size_t i) { return torch::jit::peek(stack, i, kArgumentsOfTo); };
    const c10::IValue layout = given(2), device = given(3), pinned = given(4);
    return given(1).isInt() && at::isFloatingType(given(1).toScalarType()) &&
           given(1).toScalarType() != impl->dtype().toScalarType() &&
           (layout.isNone() || layout.toLayout() == c10::kStrided) &&
           (device.isNone() || device.toDevice().is_cpu()) &&
           (pinned.isNone() || !pinned.toBool()) && given(7).isNone();
}

at::Tensor cast_of(const Stack &stack) {
    const c10::IValue &self = torch::jit::peek(stack, 0, kArgumentsOfTo);
    const c10::TensorImpl *impl = self.isTensor() ? self.toTensor().unsafeGetTensorImpl() : nullptr;
    if (impl == nullptr || !is_promise(impl) || !changes_dtype_only(impl, stack))
        return {};
    return cast_promise(storage_of(impl),
                        torch::jit::peek(stack, 1, kArgumentsOfTo).toScalarType());
}

const c10::TensorImpl *promise_in(const Stack &stack, size_t i) {
    const c10::IValue &value = torch::jit::peek(stack, i, kArgumentsOfAdd);
    const c10::TensorImpl *impl =
        value.isTensor() ? value.toTensor().unsafeGetTensorImpl() : nullptr;
    const bool is_free = impl != nullptr && is_promise(impl) && !of_is_pending(storage_of(impl));
    return is_free ? impl : nullptr;
}

// Arguments: two tensors, and a factor of the second. in_place: the first becomes the sum.
at::Tensor added(const Stack &stack, bool in_place) {
    const c10::TensorImpl *to = promise_in(stack, 0), *other = promise_in(stack, 1);
    const c10::IValue &factor = torch::jit::peek(stack, 2, kArgumentsOfAdd);
    if (to == nullptr || other == nullptr || to->sizes() != other->sizes() || !factor.isInt() ||
        factor.toInt() != 1)
        return {};
    if (!in_place)
        return sum_of_promises(storage_of(to), storage_of(other));
    if (!add_promise(storage_of(to), storage_of(other)))
        return {};
    at::Tensor self = torch::jit::peek(stack, 0, kArgumentsOfAdd).toTensor();
    self.unsafeGetTensorImpl()->bump_version();
    return self;
}

// A promise that the node of an embedding asks for, which runs on this thread.
struct AskedEmbedding {
    std::shared_ptr<PromisingLayer> layer;
    const c10::TensorImpl *dy = nullptr;
};
thread_local AskedEmbedding asked_here;

struct AskForPromise final : torch::autograd::FunctionPreHook {
    AskForPromise(std::shared_ptr<PromisingLayer> of, const torch::autograd::Node *in)
        : layer(std::move(of)), node(in) {}
    // The weight is a leaf, its gradient goes to .grad and is not copied there at once, and
    // backward itself is not recorded.
    bool goes_to_grad() const {
        const auto *end = dynamic_cast<const torch::autograd::AccumulateGrad *>(
            node->next_edge(0).function.get());
        return !at::GradMode::is_enabled() && end != nullptr && end->post_hooks().empty();
    }
    variable_list operator()(const variable_list &grads) override {
        asked_here = {}; // of a node that has failed
        if (grads.size() != 1 || !grads[0].defined() || !goes_to_grad() ||
            !layer->takes_rows_of(grads[0]))
            return grads;
        const PlainMode plain;
        at::Tensor marked = at::alias(grads[0]);
        mark(marked.unsafeGetTensorImpl());
        asked_here = {layer, marked.unsafeGetTensorImpl()};
        return {std::move(marked)};
    }
    // Compiled autograd runs the node's formula without the hook.
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const override {}
    std::shared_ptr<PromisingLayer> layer;
    const torch::autograd::Node *node; // whose hook this is
};

// Arguments: dY, indices, rows of the weight, padding index, by frequency, sparse.
at::Tensor gradient_of_embedding(const Stack &stack) {
    const auto given = [&stack](size_t i) -> const c10::IValue & {
        return torch::jit::peek(stack, i, kArgumentsOfItsBackward);
    };
    const AskedEmbedding now = std::exchange(asked_here, {});
    if (!given(0).isTensor() || given(0).toTensor().unsafeGetTensorImpl() != now.dy)
        return {};
    const at::Tensor dy = given(0).toTensor();
    unmark(dy.unsafeGetTensorImpl());
    return now.layer->promise_rows(now.layer, dy, given(1).toTensor(), given(2).toInt(),
                                   given(3).toInt());
}

} // namespace

bool answer_with_promise(const char *op, Stack *stack, size_t n) {
    if ((n != kArgumentsOfTo && n != kArgumentsOfItsBackward && n != kArgumentsOfAdd) ||
        !is_in_backward() || at::GradMode::is_enabled())
        return false;
    at::Tensor answer;
    // PyTorch shares out casts and embeddings' gradients of any size, sums of large tensors only.
    const bool is_sum = n == kArgumentsOfAdd;
    if (n == kArgumentsOfTo && std::strcmp(op, "aten::to") == 0)
        answer = cast_of(*stack);
    else if (n == kArgumentsOfAdd && std::strcmp(op, "aten::add") == 0)
        answer = added(*stack, false);
    else if (n == kArgumentsOfAdd && std::strcmp(op, "aten::add_") == 0)
        answer = added(*stack, true);
    else if (asked_here.layer && std::strcmp(op, "aten::embedding_backward") == 0)
        answer = gradient_of_embedding(*stack);
    if (!answer.defined())
        return false;
    set_threads_as_operators(is_sum ? answer.numel() : kSharedOut);
    torch::jit::drop(*stack, n);
    stack->emplace_back(std::move(answer));
    return true;
}

std::shared_ptr<PromisingLayer> promising_embedding(const char *op, const Stack &stack, size_t n) {
    if (n != kArgumentsOfEmbedding || std::strcmp(op, "aten::embedding") != 0 ||
        !at::GradMode::is_enabled())
        return nullptr;
    const c10::IValue &weight = torch::jit::peek(stack, 0, n);
    const bool by_frequency = torch::jit::peek(stack, 3, n).toBool();
    const bool is_sparse = torch::jit::peek(stack, 4, n).toBool();
    return by_frequency || is_sparse ? nullptr : promising_layer(weight.toTensor());
}

void ask_in_backward(const std::shared_ptr<PromisingLayer> &layer, const at::Tensor &output) {
    auto *node = dynamic_cast<EmbeddingBackward0 *>(output.grad_fn().get());
    if (node != nullptr)
        node->add_pre_hook(std::make_unique<AskForPromise>(layer, node));
}

} // namespace optfuse
