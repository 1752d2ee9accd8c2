// SPDX-License-Identifier: BSD-3-Clause
// operators.cpp: operators for which a promise is no look, or which make one. Stock's own nodes stand
// behind layers and embeddings. What such a node computes for the weight is one operator, which is
// ours to answer where an argument is marked: so a hook of the node marks an alias of dY. Of an
// embedding that is the node's formula; of a layer the product mm(dY', X), beside which the node may
// compute mm(dY, W) for X.
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
#include "base/threads.h"
#include "layers/layer.h"
#include "memory/memory.h"
#include "promises/layer.h"
#include "promises/promise.h"

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

constexpr int kMostNodesOfLinear = 4; // that at::linear() records down to the product

bool is_in_backward() {
    return torch::autograd::get_current_graph_task_id() != -1;
}

template <class T> bool is_a(const Node *node) {
    return dynamic_cast<const T *>(node) != nullptr;
}

// As autocast's node calls it for a weight's gradient. Anything but another dtype is a look.
bool changes_dtype_only(const c10::TensorImpl *impl, const OperatorCall &call) {
    const c10::IValue &dtype = call.argument(1), &layout = call.argument(2),
                      &device = call.argument(3), &pinned = call.argument(4);
    return dtype.isInt() && at::isFloatingType(dtype.toScalarType()) &&
           dtype.toScalarType() != impl->dtype().toScalarType() &&
           (layout.isNone() || layout.toLayout() == c10::kStrided) &&
           (device.isNone() || device.toDevice().is_cpu()) &&
           (pinned.isNone() || !pinned.toBool()) && call.argument(7).isNone();
}

// Null: the argument is no whole promise.
const c10::TensorImpl *promise_in(const OperatorCall &call, size_t i) {
    const c10::IValue &value = call.argument(i);
    const c10::TensorImpl *impl =
        value.isTensor() ? value.toTensor().unsafeGetTensorImpl() : nullptr;
    return impl != nullptr && is_as_promised(impl) ? impl : nullptr;
}

at::Tensor cast_of(const OperatorCall &call) {
    const c10::TensorImpl *impl = promise_in(call, 0);
    if (impl == nullptr || !changes_dtype_only(impl, call))
        return {};
    return cast_promise(storage_of(impl), call.argument(1).toScalarType());
}

// Arguments: two tensors, and a factor of the second. in_place: the first becomes the sum.
at::Tensor added(const OperatorCall &call, bool in_place) {
    const c10::TensorImpl *to = promise_in(call, 0), *other = promise_in(call, 1);
    const c10::IValue &factor = call.argument(2);
    if (to == nullptr || other == nullptr || of_is_pending(storage_of(to)) ||
        of_is_pending(storage_of(other)) || to->sizes() != other->sizes() || !factor.isInt() ||
        factor.toInt() != 1)
        return {};
    if (!in_place)
        return sum_of_promises(storage_of(to), storage_of(other));
    if (!add_promise(storage_of(to), storage_of(other)))
        return {};
    at::Tensor self = call.argument(0).toTensor();
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

// Whether a gradient goes into a parameter's .grad from here, maybe by way of the transposition in
// at::linear() and of autocast's cast, and is not copied at once, as by DistributedDataParallel.
bool ends_in_parameter(const Node *node) {
    if (is_a<TBackward0>(node))
        node = node->next_edge(0).function.get();
    if (is_a<ToCopyBackward0>(node))
        node = node->next_edge(0).function.get();
    const auto *end = dynamic_cast<const AccumulateGrad *>(node);
    return end != nullptr && end->post_hooks().empty();
}

struct AskForPromise final : torch::autograd::FunctionPreHook {
    AskForPromise(std::shared_ptr<PromisingLayer> of, const Node *in, size_t of_weight)
        : layer(std::move(of)), node(in), weight(of_weight) {}
    // Backward itself must not be recorded.
    variable_list operator()(const variable_list &grads) override {
        asked_here = {}; // of a node that has failed
        // An alias would not say of dY that it needs a gradient.
        if (at::GradMode::is_enabled() ||
            !ends_in_parameter(node->next_edge(weight).function.get()) || grads.size() != 1 ||
            !grads[0].defined() || grads[0].requires_grad() ||
            !layer->may_promise(grads[0], is_a<EmbeddingBackward0>(node)))
            return grads;
        at::Tensor marked = marked_alias(grads[0]);
        asked_here = {layer, node, weak(marked), nowhere()};
        return {std::move(marked)};
    }
    // Compiled autograd runs the node's formula without the hook.
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const override {}
    std::shared_ptr<PromisingLayer> layer;
    const Node *node;    // whose hook this is
    const size_t weight; // its output
};

// Arguments: dY, indices, rows of the weight, padding index, by frequency, sparse.
at::Tensor gradient_of_embedding(const OperatorCall &call) {
    const Asked now = std::exchange(asked_here, {});
    if (!refers_to(now.dy, call.argument(0)))
        return {};
    const at::Tensor dy = call.argument(0).toTensor();
    unmark(dy.unsafeGetTensorImpl());
    return now.layer->promise_rows(dy, call.argument(1).toTensor(), call.argument(2).toInt(),
                                   call.argument(3).toInt());
}

// Whether such a node, or at::linear()'s behind it, transposes dY or the promise. What that makes
// stays marked.
bool is_transposed_in_backward(const c10::IValue &self) {
    if (!is_promise(self.toTensor().unsafeGetTensorImpl()))
        return refers_to(asked_here.dy, self) && is_asked_now();
    const auto node = torch::autograd::get_current_node();
    return is_a<TBackward0>(node.get()) || is_a<AddmmBackward0>(node.get()) ||
           is_a<MmBackward0>(node.get());
}

bool transpose(const OperatorCall &call) {
    if (!is_transposed_in_backward(call.argument(0)))
        return false;
    const c10::impl::ExcludeDispatchKeyGuard seen(kPendingKey); // its kernel calls others
    call.go_on();
    const at::Tensor &output = call.stack->back().toTensor();
    if (!is_promise(output.unsafeGetTensorImpl()))
        asked_here.transposed = weak(output);
    return true;
}

// From here on the operator has answered so.
void put(const OperatorCall &call, at::Tensor answer) {
    torch::jit::drop(*call.stack, call.n());
    call.stack->emplace_back(std::move(answer));
}

bool promise_product(const OperatorCall &call) {
    if (!is_asked_now() ||
        !refers_to(std::exchange(asked_here.transposed, nowhere()), call.argument(0)))
        return false;
    const Asked now = std::exchange(asked_here, {});
    const at::Tensor dy(now.dy.lock()), x = call.argument(1).toTensor();
    unmark(dy.unsafeGetTensorImpl());
    bool is_run = false;
    at::Tensor answer = now.layer->promise(dy, x, [&] {
        is_run = true;
        call.go_on();
        return call.stack->back().toTensor();
    });
    if (!answer.defined())
        return is_run;
    if (is_run)
        call.stack->back() = std::move(answer);
    else
        put(call, std::move(answer));
    return true;
}

bool ask_behind_embedding(const OperatorCall &call) {
    const bool by_frequency = call.argument(3).toBool(), is_sparse = call.argument(4).toBool();
    if (!at::GradMode::is_enabled() || by_frequency || is_sparse)
        return false;
    const auto layer = promising_layer(call.argument(0).toTensor());
    if (!layer)
        return false;
    call.go_on();
    const at::Tensor &output = call.stack->back().toTensor();
    if (auto *node = dynamic_cast<EmbeddingBackward0 *>(output.grad_fn().get()))
        node->add_pre_hook(std::make_unique<AskForPromise>(
            std::static_pointer_cast<PromisingLayer>(layer), node, 0));
    return true;
}

bool is(const OperatorCall &call, const char *name) { return std::strcmp(call.name(), name) == 0; }

// dY stays marked where the node that asks for a promise uses it.
Run answer_dy(const char *, c10::TensorImpl *impl, bool) {
    return asked_here.dy._unsafe_get_target() == impl && is_in_backward() && is_asked_now()
               ? go_on
               : nullptr;
}

// Autograd puts a promise into .grad, and a norm may be late (clipping/late_norm.h).
Run answer_promise(const char *op, c10::TensorImpl *, bool) {
    const bool needs_none = (is_in_backward() && std::strcmp(op, "aten::detach") == 0) ||
                            std::strcmp(op, "optfuse::total_norm") == 0;
    return needs_none ? go_on : nullptr;
}

// If autograd casts a promise on its way, adds one to another, transposes one, or computes the
// gradient of an embedding that may be promised: puts the promise in the place of the arguments.
bool answer_with_promise(const OperatorCall &call) {
    const size_t n = call.n(); // operators have overloads
    if ((n != 1 && n != 3 && n != 6 && n != 8) || !is_in_backward())
        return false;
    if (n == 1 && is(call, "aten::t"))
        return transpose(call);
    if (at::GradMode::is_enabled())
        return false;
    at::Tensor answer;
    // PyTorch shares out casts and embeddings' gradients of any size, sums of large tensors only.
    const bool is_sum = n == 3;
    if (n == 8 && is(call, "aten::to")) // of a dtype and layout
        answer = cast_of(call);
    else if (is_sum && is(call, "aten::add"))
        answer = added(call, false);
    else if (is_sum && is(call, "aten::add_"))
        answer = added(call, true);
    else if (n == 6 && is(call, "aten::embedding_backward") && is_asked_now())
        answer = gradient_of_embedding(call);
    if (!answer.defined())
        return false;
    set_threads_as_operators(is_sum ? answer.numel() : kSharedOut);
    put(call, std::move(answer));
    return true;
}

// If the operator is the product for a weight, which may be promised: puts the promise in the place
// of the arguments. Behind aten::embedding: has autograd's node ask for one.
bool end_with_promise(const OperatorCall &call) {
    const size_t n = call.n();
    if (n == 2 && is(call, "aten::mm"))
        return promise_product(call);
    return n == 5 && is(call, "aten::embedding") && ask_behind_embedding(call);
}

} // namespace

const Absent absent::promised = {free_promise,       answer_promise,      keep_promise,
                                 update_by_panels,   answer_with_promise, end_with_promise,
                                 numbers_of_promise};
const Absent absent::asked = {nullptr, answer_dy};

void PromisingLayer::ask_behind_linear(const at::Tensor &output, const at::Tensor &weight,
                                       uint64_t first_node) {
    const Edge to_weight = torch::autograd::impl::gradient_edge(weight);
    Node *node = torch::autograd::impl::grad_fn_unsafe(output);
    for (int i = 0; i < kMostNodesOfLinear && node != nullptr && node->sequence_nr() >= first_node;
         i++) {
        const size_t of_weight = is_a<AddmmBackward0>(node) ? 2 : 1;
        if (of_weight == 2 || is_a<MmBackward0>(node)) {
            const Node *transposed = node->next_edge(of_weight).function.get();
            if (is_a<TBackward0>(transposed) && transposed->next_edge(0) == to_weight)
                node->add_pre_hook(
                    std::make_unique<AskForPromise>(shared_from_this(), node, of_weight));
            return;
        }
        node = node->num_outputs() == 0 ? nullptr : node->next_edge(0).function.get();
    }
}

} // namespace optfuse
