// SPDX-License-Identifier: BSD-3-Clause
// beside.cpp: see beside.h.
#include "gpu/beside.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/generated/Functions.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/input_metadata.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <new>
#include <utility>

#include "base/device.h"
#include "guard.h"

namespace optfuse {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::InputMetadata;
using torch::autograd::Node;
using torch::autograd::variable_list;

c10::Stream current_on(const c10::Device &device) {
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream side_of(const c10::Device &device) {
    return c10::Stream(c10::Stream::UNSAFE, device, side_stream(device.index()));
}

// The allocator gives the memory to nobody before what the stream does now is done.
void record(const at::Tensor &t, const c10::Stream &stream) {
    if (t.defined() && t.has_storage() && is_gpu(t.device()))
        record_on_stream(t.storage().unsafeGetStorageImpl(),
                         {stream.device_index(), stream.id(), 0});
}

// Autocast's copy of a parameter, made in this forward pass.
bool is_cast(const Node *node) {
    return dynamic_cast<const torch::autograd::generated::ToCopyBackward0 *>(node) != nullptr;
}

AccumulateGrad *end_of(const Edge &edge) {
    Node *node = edge.function.get();
    if (node != nullptr && is_cast(node))
        node = node->next_edge(0).function.get();
    return dynamic_cast<AccumulateGrad *>(node);
}

// Nobody but the graph of this forward pass may hold a node that is to change its stream.
bool can_run_on(const c10::Stream &side, const at::Tensor &t) {
    if (!t.defined() || !t.requires_grad())
        return true;
    if (t.is_leaf()) {
        const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(t);
        return !accumulator || accumulator->stream() == side;
    }
    Node *cast = torch::autograd::impl::grad_fn_unsafe(t);
    if (cast == nullptr || !is_cast(cast))
        return false;
    const Edge &edge = cast->next_edge(0);
    return end_of(edge) != nullptr &&
           (edge.function->stream() == side || edge.function.use_count() == 1);
}

// A node's record of its input, with the stream, can be copied, but not assigned.
void put_on_current_stream(Node *node, const at::Tensor &input) {
    InputMetadata fresh(input);
    InputMetadata *known = &node->mutable_input_metadata(0);
    std::destroy_at(known);
    new (known) InputMetadata(std::move(fresh));
}

struct ReturnOutputs final : torch::autograd::FunctionPostHook {
    explicit ReturnOutputs(const c10::Stream &of) : stream(of) {}
    variable_list operator()(const variable_list &outputs, const variable_list &) override {
        for (const at::Tensor &t : outputs)
            if (OF_GUARD(dw_return))
                record(t, stream);
        return outputs;
    }
    const c10::Stream stream;
};

void wait_for(const c10::Stream &late, const c10::Stream &early) {
    c10::Event event(early.device_type());
    event.record(early);
    event.block(late);
}

void join(const Streams &streams) {
    if (current_on(streams.layer.device()) != streams.layer && OF_GUARD(dw_join))
        wait_for(streams.layer, streams.side); // else autograd has
}

thread_local std::optional<Streams> last_streams; // of dW on this thread

} // namespace

std::optional<Streams> streams_beside(const at::Tensor &w, const at::Tensor &bias) {
    if (!is_gpu(w.device()))
        return {};
    const Streams streams{current_on(w.device()), side_of(w.device())};
    if (!can_run_on(streams.side, w) || !can_run_on(streams.side, bias))
        return {};
    return streams;
}

void bring_to_side(const at::Tensor &t) {
    if (t.is_leaf())
        return; // its node is made with the side stream current, or was
    Node *cast = torch::autograd::impl::grad_fn_unsafe(t);
    const Edge edge = cast->next_edge(0);
    put_on_current_stream(edge.function.get(), end_of(edge)->variable);
    put_on_current_stream(cast, t);
}

void begin_on_side(const Streams &streams) {
    last_streams = streams;
}

void lend_to_side(const at::Tensor &t, const Streams &streams) {
    if (OF_GUARD(dw_lend))
        record(t, streams.side);
}

bool is_on_side(const Streams &streams) {
    return current_on(streams.side.device()) == streams.side;
}

void return_outputs(Node *node, const Streams &streams) {
    node->add_post_hook(std::make_unique<ReturnOutputs>(streams.layer));
}

// A gradient that was there is added to on the side stream, and one that is new may have been
// copied there. The stream that called backward() has been joined by autograd; in stock the
// layer's stream needs no joining.
void return_at_end(const edge_list &parameters, const Streams &streams) {
    if (torch::autograd::get_current_graph_task_id() == -1)
        return; // not in backward(): the node itself was called
    variable_list leaves;
    for (const Edge &edge : parameters)
        if (const AccumulateGrad *end = end_of(edge))
            leaves.push_back(end->variable);
    for (const at::Tensor &leaf : leaves)
        lend_to_side(leaf.grad(), streams);
    torch::autograd::Engine::get_default_engine().queue_callback(
        [leaves = std::move(leaves), streams] {
            for (const at::Tensor &leaf : leaves)
                if (OF_GUARD(dw_return))
                    record(leaf.grad(), streams.layer);
            join(streams);
        });
}

LastingMemory::LastingMemory(const c10::Device &device) {
    if (!last_streams || last_streams->side.device() != device || !is_on_side(*last_streams) ||
        !OF_GUARD(dw_state))
        return;
    streams_ = last_streams;
    guard_.reset_stream(streams_->layer);
}

LastingMemory::~LastingMemory() {
    if (!streams_)
        return;
    guard_.reset();
    wait_for(streams_->side, streams_->layer);
}

} // namespace optfuse
