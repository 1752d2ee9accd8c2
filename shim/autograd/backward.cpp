// SPDX-License-Identifier: BSD-3-Clause
// backward.cpp: backward fusion over autograd. Its hook says which gradient is complete in
// which pass (of_pass_ready()); the core decides what follows, and asks here for what only
// autograd and Python know.
#include <ATen/ops/as_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

#include "absent/consumed.h"
#include "autograd/backward.h"
#include "autograd/nested_passes.h"
#include "base/compat.h"
#include "base/device.h"
#include "base/error.h"
#include "base/plain_mode.h"
#include "base/threads.h"
#include "gpu/beside.h"
#include "guard.h"
#include "host/host.h"
#include "memory/gradient.h"
#include "memory/heap.h"
#include "memory/memory.h"
#include "plan/plan.h"
#include "plan/references.h"
#include "plan/scalars.h"
#include "plan/slots.h"
#include "python/callback.h"
#include "python/gil.h"

namespace optfuse {

bool is_closed(const Plan *plan) {
    return plan->closed.load(std::memory_order_acquire);
}

namespace {

// By DistributedDataParallel, whose hooks are no Python's.
bool is_reduced_by_ddp(c10::TensorImpl *param) {
    return any_later_hook(param, [](const auto &hook) {
        const auto &of = *hook;
        return typeid(of) == typeid(torch::autograd::utils::LambdaPostHook);
    });
}

// Throws the core's error, or what Python has raised. slot: the one that the core names; or OF_NO_SLOT.
void check(const Plan *plan, size_t slot, of_status status) {
    if (status == OF_OK || is_closed(plan))
        return;
    const std::string text = of_error_message();
    if (_object *type = std::exchange(raised_in_python, nullptr); type != nullptr)
        fail(text_of_raised, type);
    if (slot == OF_NO_SLOT)
        fail("optfuse: " + text);
    const std::string label = slot < plan->slots.size() ? plan->slots[slot]->label : "a parameter";
    const std::string place = status == OF_TWICE ? find_caller().place : "";
    fail("optfuse: " + place +
         (text.find(label) == std::string::npos ? label + ": " + text : text));
}

// Those of them that are a part of a bucket become tensors of their own.
void leave_buckets(const Plan *plan);

// The functions of of_backward_host.

bool begin(void *ctx, bool only_adds) {
    auto *plan = static_cast<Plan *>(ctx);
    raised_in_python = nullptr;
    if (!OF_GUARD(create_graph) || !c10::GradMode::is_enabled())
        return plan->owner->begin_backward(plan, only_adds);
    of_set_error("backward(create_graph=True) needs the weights and gradients of this backward "
                 "later, but backward fusion updates them at once; use "
                 "optfuse.fuse(optimizer, mode=\"forward\")");
    return false;
}

of_device measure(void *, void *tensor, int64_t *numel, size_t *bytes, of_stream *on) {
    const c10::TensorImpl *p = static_cast<Slot *>(tensor)->param;
    *numel = p->numel();
    *bytes = static_cast<size_t>(p->numel()) * p->dtype().itemsize();
    if (!is_gpu(p->device()))
        return OF_CPU;
    *on = current_stream(p->device().index());
    return OF_CUDA;
}

bool make_state(void *ctx, size_t slot) {
    auto *plan = static_cast<Plan *>(ctx);
    const LastingMemory lasting(plan->slots[slot]->param->device());
    return plan->owner->make_state(plan, slot);
}

// Whether others hold the gradient, as a variable of the user's does, or its memory, as a buffer
// does that the gradient is a part of. Autograd's own references are gone when the hook is
// called. Sparse gradients, which are refused, have no memory here.
bool is_gradient_shared(const Slot *slot, const at::Tensor &grad) {
    const c10::TensorImpl *g = grad.unsafeGetTensorImpl();
    if (slot->gradient_is_known)
        return false;
    const size_t ours = slot->consumed.is_same(grad) ? 1 : 0; // overwritten after it was consumed
    if (grad.use_count() > 1 + ours + idle_references(*g))
        return true;
    c10::StorageImpl *memory = storage_of(g);
    return memory != nullptr && OF_GUARD(buffer) && !is_private(memory, 0);
}

// One backward pass. Autograd's graph task owns it: the pass has ended or failed when it dies.
class EndOfPass : Pinned {
  public:
    EndOfPass(std::shared_ptr<Plan> of, of_pass *begun) : plan(std::move(of)), pass(begun) {
        of_pass_retain(pass);
    }
    ~EndOfPass() {
        const WithoutGil wait;
        of_pass_abandon(pass);
        of_pass_release(pass);
    }
    void run() {
        const KeepThreads as_before;
        size_t at = OF_NO_SLOT;
        const bool waited = !plan->reduces || is_closed(plan.get()) ||
                            plan->owner->await_reduction(plan.get());
        const of_status status = waited ? of_pass_end(pass, &at) : OF_REFUSED;
        if (plan->reduces)
            leave_buckets(plan.get());
        check(plan.get(), at, status);
        const bool is_step = plan->mode != OF_FINAL || !of_pass_only_adds(pass);
        if (!is_closed(plan.get()) && is_step && !plan->owner->end_backward(plan.get()))
            check(plan.get(), OF_NO_SLOT, OF_REFUSED);
    }

  private:
    const std::shared_ptr<Plan> plan;
    of_pass *const pass;
};

void keep_heap(Plan *plan) {
    if (plan->backwards.fetch_add(1, std::memory_order_relaxed) == 1) {
        of_heap_use();
        plan->uses_heap.store(true, std::memory_order_release);
    }
    if (plan->uses_heap.load(std::memory_order_acquire))
        of_heap_begin_backward();
}

void begin_backward(const std::shared_ptr<Plan> &plan, of_pass *pass, const at::Tensor &param) {
    auto end = std::make_shared<EndOfPass>(plan, pass);
    if (!of_pass_only_adds(pass) && param.device().is_cpu())
        keep_heap(plan.get());
    const auto behind = plan->mode == OF_FINAL ? run_behind_outermost : run_behind_this_pass;
    behind([end = std::move(end)] { end->run(); });
}

struct Release {
    void operator()(of_pass *pass) const { of_pass_release(pass); }
};

const of_backward_host backward_host = {sizeof(of_backward_host), begin, measure, make_state};

// Others may see the parameter's memory (another parameter, a graph that is kept, an alias of
// the user's) or the gradient. Such an update is left to step(), so that others see the weight
// change when stock changes it, and parameters that overlap change in stock's order. So is an
// update whose state others have, too: two optimizers use it in the order of their step(); and so is
// one whose gradient a hook of the AccumulateGrad node may still change.
of_found look(const Slot *slot, c10::TensorImpl *p, const at::Tensor &grad) {
    if (!slot->reduced && OF_GUARD(ddp) && is_reduced_later(p)) {
        if (!is_reduced_by_ddp(p))
            return OF_FOUND_NOTHING;
        of_set_error("the gradient of %s is changed after it is complete (DistributedDataParallel "
                     "reduces it between processes), so backward fusion would use the wrong one; "
                     "name the model, optfuse.fuse(optimizer, optfuse.Backward(ddp=model)), or "
                     "use optfuse.fuse(optimizer, mode=\"forward\")",
                     slot->label.c_str());
        return OF_FOUND_ERROR;
    }
    // A reduced one lies in a bucket of DistributedDataParallel, which others read no more.
    const bool is_recorded = runs_lines(slot); // which are users of the memory, too
    if (slot->plan->is_left ||
        (OF_GUARD(shared_state) && !is_recorded && shares_state(*slot)))
        return OF_FOUND_NOTHING;
    const bool has_others = is_recorded ? !slot->plan->ahead->knows_all_users(*slot)
                                        : !is_private(storage_of(p), slot->aliases.size());
    const bool is_left = OF_GUARD(postpone) &&
                         (has_others || (!slot->reduced && is_gradient_shared(slot, grad)));
    return is_left ? OF_FOUND_NOTHING : OF_FOUND_INPUTS;
}

of_found look_and_collect(void *ctx, void *tensor, of_inputs *in) {
    const auto *slot = static_cast<const Slot *>(tensor);
    const at::Tensor &grad = gradient_of(slot->param);
    if (in->in_backward && grad.defined()) {
        const of_found found = attempt("preparing the update of ", slot->label, OF_FOUND_ERROR,
                                       [&] { return look(slot, slot->param, grad); });
        if (found != OF_FOUND_INPUTS)
            return found;
    }
    return collect(ctx, tensor, in);
}

// Whether zero_grad() has let go of the consumed gradient, and nobody else holds it.
bool can_reuse_consumed(const at::Tensor &consumed, const at::Tensor &param) {
    return consumed.defined() &&
           consumed.use_count() == 1 + idle_references(*consumed.unsafeGetTensorImpl()) &&
           is_consumed(consumed.unsafeGetTensorImpl()) &&
           !(has_aliases(consumed.unsafeGetTensorImpl()) && OF_GUARD(consumed_alias)) &&
           !consumed.requires_grad() && consumed.device() == param.device() &&
           consumed.dtype() == param.dtype() && equal(consumed.sizes(), param.sizes()) &&
           (equal(consumed.strides(), param.strides()) || !param.is_non_overlapping_and_dense());
}

void consume_gradient(References *refs) {
    at::Tensor &grad = refs->param.mutable_grad();
    if (!grad.defined() || grad.unsafeGetTensorImpl() != refs->grad)
        return;
    refs->old_grad = std::move(grad);
    Slot *slot = refs->slot;
    if (!OF_GUARD(consumed)) {
        PlainMode plain; // under the plan's lock: no operator may come back to us
        grad = at::zeros(refs->old_grad.sizes(), refs->old_grad.options());
        return;
    }
    if (!can_reuse_consumed(slot->consumed, refs->param)) {
        refs->old_consumed = std::move(slot->consumed);
        slot->consumed = make_consumed(refs->param, slot->plan->steps);
    }
    slot->used = consume_again(slot->consumed.unsafeGetTensorImpl());
    grad = slot->consumed;
}

void settle_and_consume(void *ctx, void *opaque, bool was_deferred) {
    auto *refs = static_cast<References *>(opaque);
    settle(ctx, refs, was_deferred);
    if (!refs->consumes)
        return;
    consume_gradient(refs);
    note_versions(*refs->slot);
}

} // namespace

void update_in_backward(of_host *host) {
    host->collect = look_and_collect;
    host->settle = settle_and_consume;
    host->backward = &backward_host;
}

void update_in_hooks(of_host *host) {
    host->backward = &backward_host;
}

namespace {

using Pass = std::unique_ptr<of_pass, Release>;

// That of this thread's graph task. None: Python has ended the plan meanwhile.
Pass pass_under_way(const std::shared_ptr<Plan> &plan, size_t slot, const at::Tensor &param) {
    const int64_t task = plan->mode == OF_FINAL // from 0 on; -1: none
                             ? outermost_graph_task()
                             : torch::autograd::get_current_graph_task_id();
    of_pass *pass = nullptr;
    bool first = false;
    const of_status status =
        of_pass_begin(plan->core, static_cast<of_token>(task + 1), &pass, &first);
    check(plan.get(), slot, status);
    Pass held(pass);
    if (first)
        begin_backward(plan, pass, param);
    return held;
}

void say_ready(const Plan *plan, of_pass *pass, size_t slot) {
    const of_status status = of_pass_ready(pass, slot, &slot);
    check(plan, slot, status);
}

// number: of its slot, before this pass has told the plan of its parameters, which lie in other slots
// then perhaps. nullptr: it is none of them any more.
const Slot *slot_now(const Plan &plan, size_t number, const c10::TensorImpl *param) {
    if (number < plan.slots.size() && plan.slots[number]->param == param)
        return plan.slots[number];
    const auto found = std::find_if(plan.slots.begin(), plan.slots.end(),
                                    [param](const Slot *slot) { return slot->param == param; });
    return found == plan.slots.end() ? nullptr : *found;
}

// A hook of the user's may have used the gradient, and left none.
void update_final(const Plan &plan, size_t number, c10::TensorImpl *param) {
    const Slot *slot = slot_now(plan, number, param);
    if (slot == nullptr || !param->grad().defined())
        return;
    if (is_reduced_by_ddp(param) && OF_GUARD(ddp))
        fail("optfuse: the gradient of " + slot->label +
             " is changed after it is complete (DistributedDataParallel reduces it between "
             "processes), so an update that is final would use the wrong one; updates under "
             "DistributedDataParallel can't be final: leave that out, and name the model");
    if (!plan.owner->update_final(slot->plan, slot->index))
        check(&plan, slot->index, OF_REFUSED);
    param->mutable_grad().reset();
}

} // namespace

void gradient_is_complete(const std::shared_ptr<Plan> &plan, size_t slot, const at::Tensor &param) {
    const KeepThreads as_before;
    const Pass pass = pass_under_way(plan, slot, param);
    if (plan->mode == OF_FINAL) {
        if (pass && !of_pass_only_adds(pass.get()))
            update_final(*plan, slot, param.unsafeGetTensorImpl());
        return;
    }
    const bool later = slot < plan->slots.size() && plan->slots[slot]->reduced && OF_GUARD(reduced);
    if (pass && !later)
        say_ready(plan.get(), pass.get(), slot);
}

namespace {

// As autograd lays gradients out, and DistributedDataParallel the parts of its buckets.
at::Tensor part_of(const at::Tensor &bucket, int64_t offset, const c10::TensorImpl *p) {
    const at::Tensor part =
        at::as_strided(bucket, {p->numel()}, {1}, bucket.storage_offset() + offset);
    return p->is_non_overlapping_and_dense() ? part.as_strided(p->sizes(), p->strides())
                                             : part.view(p->sizes());
}

// A gradient that backward has not used stays in .grad, where the bucket's next use must not reach
// it.
void leave_bucket(Slot *slot) {
    const at::Tensor &grad = slot->param->grad();
    if (slot->part != nullptr && grad.unsafeGetTensorImpl() == slot->part)
        reference_to(slot->param).mutable_grad() = grad.clone();
    slot->part = nullptr;
}

void leave_buckets(const Plan *plan) {
    const PlainMode plain;
    for (Slot *slot : plan->slots)
        leave_bucket(slot);
}

} // namespace

bool take_parts(const std::shared_ptr<Plan> &plan, const std::vector<Slot *> &slots,
                const at::Tensor &bucket, const std::vector<int64_t> &offsets) {
    const Pass pass = pass_under_way(plan, slots[0]->index, reference_to(slots[0]->param));
    if (!pass || of_pass_only_adds(pass.get()))
        return false;
    const PlainMode plain;
    for (size_t i = 0; i < slots.size(); i++) {
        at::Tensor part = part_of(bucket, offsets[i], slots[i]->param);
        slots[i]->part = part.unsafeGetTensorImpl();
        reference_to(slots[i]->param).mutable_grad() = std::move(part);
    }
    return true;
}

void give_part(const at::Tensor &param, const at::Tensor &bucket, int64_t offset) {
    const PlainMode plain;
    const at::Tensor part = part_of(bucket, offset, param.unsafeGetTensorImpl());
    if (param.grad().defined())
        param.mutable_grad().copy_(part);
    else
        param.mutable_grad() = part.clone();
}

void gradients_are_complete(const std::shared_ptr<Plan> &plan, const std::vector<size_t> &slots,
                            const at::Tensor &param) {
    const KeepThreads as_before;
    const Pass pass = pass_under_way(plan, slots.empty() ? OF_NO_SLOT : slots.front(), param);
    if (!pass)
        return;
    for (const size_t slot : slots)
        say_ready(plan.get(), pass.get(), slot);
    size_t at = OF_NO_SLOT;
    const of_status status = of_pass_run(pass.get(), &at);
    check(plan.get(), at, status);
}

} // namespace optfuse
