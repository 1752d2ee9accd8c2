// SPDX-License-Identifier: BSD-3-Clause
// operators.cpp: see operators.h. Stock's own nodes stand behind layers and embeddings. What such a
// node computes for the weight is one operator, which is ours to answer where an argument is
// marked: so a hook of the node marks an alias of dY. Of an embedding that is the node's formula;
// of a layer the product mm(dY', X), beside which the node may compute mm(dY, W) for X.
#include "promises/operators.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstddef>
#include <cstring>
#include <utility>

#include "base/compat.h"
#include "layers/layer.h"
#include "promises/layer.h"
#include "promises/promise.h"
#include "memory/memory.h"
#include "base/threads.h"

namespace optfuse {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::autograd::generated::AddmmBackward0;
using torch::autograd::generated::EmbeddingBackward0;
using torch::autograd::generated::MmBackward0;
using torch::autograd::generated::TBackward0;
using torch::autograd::generated::ToCopyBackward0;
using torch::jit::Stack;

constexpr size_t kArgumentsOfTo = 8; // of aten::to.dtype_layout
constexpr size_t kArgumentsOfAdd = 3;
constexpr size_t kArgumentsOfEmbedding = 5;
constexpr size_t kArgumentsOfItsBackward = 6;
constexpr size_t kArgumentsOfMm = 2;
constexpr int kMostNodesOfLinear = 4; // that at::linear() records down to the product

bool is_in_backward() {
    return torch::autograd::get_current_graph_task_id() != -1;
}

template <class T> bool is_a(const Node *node) {
    return dynamic_cast<const T *>(node) != nullptr;
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
    if (impl == nullptr || !is_promise(impl) || !is_as_promised(impl) ||
        !changes_dtype_only(impl, stack))
        return {};
    return cast_promise(storage_of(impl),
                        torch::jit::peek(stack, 1, kArgumentsOfTo).toScalarType());
}

const c10::TensorImpl *promise_in(const Stack &stack, size_t i) {
    const c10::IValue &value = torch::jit::peek(stack, i, kArgumentsOfAdd);
    const c10::TensorImpl *impl =
        value.isTensor() ? value.toTensor().unsafeGetTensorImpl() : nullptr;
    const bool is_free = impl != nullptr && is_promise(impl) && is_as_promised(impl) &&
                         !of_is_pending(storage_of(impl));
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

WeakTensor weak(const at::Tensor &t) {
    return WeakTensor(t.getIntrusivePtr());
}

WeakTensor nowhere() {
    return weak(at::Tensor());
}

// A promise that a node asks for which runs on this thread. Weak references, so that no other
// tensor comes to lie there.
struct Asked {
    std::shared_ptr<PromisingLayer> layer; // null: none
    const Node *node = nullptr;
    at::ScalarType dtype = at::kFloat; // of the parameter
    WeakTensor dy = nowhere();         // the marked alias of dY
    WeakTensor transposed = nowhere(); // of a layer: the last dY' made of it
};
thread_local Asked asked_here;

bool is_asked_now() {
    return asked_here.layer && !at::GradMode::is_enabled() &&
           !c10::impl::TorchDispatchModeTLS::any_modes_set() && // of a saved tensor's hook
           torch::autograd::get_current_node().get() == asked_here.node;
}

bool refers_to(const WeakTensor &tensor, const c10::IValue &value) {
    return value.isTensor() &&
           value.toTensor().unsafeGetTensorImpl() == tensor._unsafe_get_target();
}

// With dY's version counter, so that hooks which write to one write to both.
at::Tensor marked_alias(const at::Tensor &dy) {
    const c10::TensorImpl *impl = dy.unsafeGetTensorImpl();
    at::Tensor alias(dy.is_inference()
                         ? impl->shallow_copy_and_detach(c10::VariableVersion(0u), false)
                         : impl->shallow_copy_and_detach(impl->version_counter(), false));
    mark(alias.unsafeGetTensorImpl());
    return alias;
}

// The parameter into whose .grad a gradient goes from here, maybe by way of the transposition in
// at::linear() and of autocast's cast; null: none, or it is copied there at once, as by
// DistributedDataParallel.
const at::Tensor *receiver(const Node *node) {
    if (is_a<TBackward0>(node))
        node = node->next_edge(0).function.get();
    if (is_a<ToCopyBackward0>(node))
        node = node->next_edge(0).function.get();
    const auto *end = dynamic_cast<const AccumulateGrad *>(node);
    return end != nullptr && end->post_hooks().empty() ? &end->variable : nullptr;
}

struct AskForPromise final : torch::autograd::FunctionPreHook {
    AskForPromise(std::shared_ptr<PromisingLayer> of, const Node *in, size_t of_weight)
        : layer(std::move(of)), node(in), weight(of_weight) {}
    // Backward itself must not be recorded.
    variable_list operator()(const variable_list &grads) override {
        asked_here = {}; // of a node that has failed
        const at::Tensor *parameter =
            at::GradMode::is_enabled() ? nullptr : receiver(node->next_edge(weight).function.get());
        // An alias would not say of dY that it needs a gradient.
        if (parameter == nullptr || grads.size() != 1 || !grads[0].defined() ||
            grads[0].requires_grad() ||
            !layer->may_promise(grads[0], is_a<EmbeddingBackward0>(node)))
            return grads;
        at::Tensor marked = marked_alias(grads[0]);
        asked_here = {layer, node, parameter->scalar_type(), weak(marked), nowhere()};
        return {std::move(marked)};
    }
    // Compiled autograd runs the node's formula without the hook.
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const override {}
    std::shared_ptr<PromisingLayer> layer;
    const Node *node;    // whose hook this is
    const size_t weight; // its output
};

// Arguments: dY, indices, rows of the weight, padding index, by frequency, sparse.
at::Tensor gradient_of_embedding(const Stack &stack) {
    const auto given = [&stack](size_t i) -> const c10::IValue & {
        return torch::jit::peek(stack, i, kArgumentsOfItsBackward);
    };
    const Asked now = std::exchange(asked_here, {});
    if (!refers_to(now.dy, given(0)))
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
    else if (std::strcmp(op, "aten::embedding_backward") == 0 && is_asked_now())
        answer = gradient_of_embedding(*stack);
    if (!answer.defined())
        return false;
    set_threads_as_operators(is_sum ? answer.numel() : kSharedOut);
    torch::jit::drop(*stack, n);
    stack->emplace_back(std::move(answer));
    return true;
}

bool answer_product_with_promise(const char *op, Stack *stack, size_t n) {
    if (n != kArgumentsOfMm || std::strcmp(op, "aten::mm") != 0 || !is_asked_now() ||
        !refers_to(std::exchange(asked_here.transposed, nowhere()), torch::jit::peek(*stack, 0, n)))
        return false;
    const Asked now = std::exchange(asked_here, {});
    const at::Tensor dy(now.dy.lock()), &x = torch::jit::peek(*stack, 1, n).toTensor();
    unmark(dy.unsafeGetTensorImpl());
    at::Tensor answer = now.layer->promise(now.layer, dy, x, now.dtype);
    if (!answer.defined())
        return false;
    torch::jit::drop(*stack, n);
    stack->emplace_back(std::move(answer));
    return true;
}

bool is_no_look(const char *op, const c10::TensorImpl *impl) {
    if (!is_in_backward())
        return false;
    return is_promise(impl) ? std::strcmp(op, "aten::detach") == 0
                            : asked_here.dy._unsafe_get_target() == impl && is_asked_now();
}

bool transposes_in_backward(const char *op, const Stack &stack, size_t n) {
    if (n != 1 || std::strcmp(op, "aten::t") != 0 || !is_in_backward())
        return false;
    const c10::IValue &self = torch::jit::peek(stack, 0, n);
    if (!is_promise(self.toTensor().unsafeGetTensorImpl()))
        return refers_to(asked_here.dy, self) && is_asked_now();
    const auto node = torch::autograd::get_current_node();
    return is_a<TBackward0>(node.get()) || is_a<AddmmBackward0>(node.get()) ||
           is_a<MmBackward0>(node.get());
}

void note_transposed(const at::Tensor &output) {
    if (!is_promise(output.unsafeGetTensorImpl()))
        asked_here.transposed = weak(output);
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

void ask_behind_embedding(const std::shared_ptr<PromisingLayer> &layer, const at::Tensor &output) {
    auto *node = dynamic_cast<EmbeddingBackward0 *>(output.grad_fn().get());
    if (node != nullptr)
        node->add_pre_hook(std::make_unique<AskForPromise>(layer, node, 0));
}

void ask_behind_linear(const std::shared_ptr<PromisingLayer> &layer, const at::Tensor &output,
                       const at::Tensor &weight, uint64_t first_node) {
    const Edge to_weight = torch::autograd::impl::gradient_edge(weight);
    Node *node = torch::autograd::impl::grad_fn_unsafe(output);
    for (int i = 0; i < kMostNodesOfLinear && node != nullptr && node->sequence_nr() >= first_node;
         i++) {
        const size_t of_weight = is_a<AddmmBackward0>(node) ? 2 : 1;
        if (of_weight == 2 || is_a<MmBackward0>(node)) {
            const Node *transposed = node->next_edge(of_weight).function.get();
            if (is_a<TBackward0>(transposed) && transposed->next_edge(0) == to_weight)
                node->add_pre_hook(std::make_unique<AskForPromise>(layer, node, of_weight));
            return;
        }
        node = node->num_outputs() == 0 ? nullptr : node->next_edge(0).function.get();
    }
}

} // namespace optfuse
