// SPDX-License-Identifier: BSD-3-Clause
// gradient_hook.cpp: backward fusion's entry. A parameter has one slot for a
// post-accumulate-grad hook; ours takes it and calls whatever was there first.
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "compat.h"
#include "error.h"
#include "guard.h"
#include "memory.h"
#include "tensors.h"

namespace optfuse {

of_shim_callback *python_callback = nullptr;
thread_local _object *raised_in_python = nullptr;

namespace {

using Others = std::unique_ptr<torch::autograd::PostAccumulateGradHook>;

std::string label_of(const Plan *plan, size_t slot) {
    return slot < plan->slots.size() ? plan->slots[slot]->label : "a parameter";
}

bool is_closed(const Plan *plan) {
    return plan->closed.load(std::memory_order_acquire);
}

void check(const Plan *plan, size_t slot, int status) {
    if (status == OF_OK || is_closed(plan))
        return;
    const std::string text = of_error_message();
    const std::string label = label_of(plan, slot);
    throw Error("optfuse: " + (text.find(label) == std::string::npos ? label + ": " + text : text));
}

int ask_python(Plan *plan, of_shim_event event, size_t slot) {
    raised_in_python = nullptr;
    const int answer = python_callback(handle_of(plan), event, slot);
    if (answer != 0)
        return answer;
    if (raised_in_python != nullptr)
        throw Error(of_error_message(), raised_in_python);
    throw Error(std::string("optfuse: ") + of_error_message());
}

void refuse_later_reduction(const Plan *plan, size_t slot, const at::Tensor &param) {
    if (!OF_GUARD(ddp))
        return;
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(param);
    if (accumulator && !accumulator->post_hooks().empty())
        throw Error("optfuse: the gradient of " + label_of(plan, slot) +
                    " is changed after it is complete (DistributedDataParallel reduces it "
                    "between processes), so backward fusion would use the wrong one; use "
                    "optfuse.fuse(optimizer, mode=\"forward\")");
}

// Between the pass that updated this parameter and step(): the gradient would
// be left for a later step, where stock applies it with this one.
void refuse_late_addition(const Plan *plan, size_t slot) {
    if (OF_GUARD(added_late) && of_plan_is_updated(plan->core, slot))
        throw Error("optfuse: a backward pass that only adds gradients came after the one that "
                    "updated " + label_of(plan, slot) + "; call step() first, or use "
                    "optfuse.fuse(optimizer, mode=\"forward\")");
}

void begin_backward(const std::shared_ptr<Plan> &plan, size_t first) {
    if (OF_GUARD(create_graph) && c10::GradMode::is_enabled())
        throw Error("optfuse: backward(create_graph=True) needs the weights and gradients "
                    "of this backward later, but backward fusion updates them at once (seen at " +
                    label_of(plan.get(), first) +
                    "); use optfuse.fuse(optimizer, mode=\"forward\")");
    const bool adds = ask_python(plan.get(), OF_SHIM_BACKWARD, first) == OF_SHIM_ADDS;
    plan->last_adds.store(adds, std::memory_order_relaxed);
    if (adds)
        return;
    torch::autograd::Engine::get_default_engine().queue_callback([plan] {
        if (!is_closed(plan.get()) && of_plan_close(plan->core) != OF_OK)
            throw Error(std::string("optfuse: ") + of_error_message());
    });
}

int spend(Plan *plan, size_t slot) {
    if (slot < plan->slots.size())
        plan->slots[slot]->spends = true;
    return of_plan_gradient(plan->core, slot);
}

// The parameter's memory (to another parameter, a graph that is kept, an alias of
// the user's) or its gradient (to another parameter, a variable of the user's).
bool is_known_to_others(const at::Tensor &param) {
    const at::Tensor &grad = param.grad();
    return !is_private(storage_of(param.unsafeGetTensorImpl()), 0) ||
           (grad.defined() && grad.use_count() > 1 + idle_references(*grad.unsafeGetTensorImpl()));
}

// The gradient of one parameter is complete. Python may end the plan meanwhile.
// What others know too is left to step(): then they see it change when, and
// parameters that overlap in the order in which, stock changes it.
void update(const std::shared_ptr<Plan> &plan, size_t slot, const at::Tensor &param) {
    if (plan->adding.load(std::memory_order_acquire)) {
        refuse_late_addition(plan.get(), slot);
        return;
    }
    refuse_later_reduction(plan.get(), slot, param);
    const int task = torch::autograd::get_current_graph_task_id();
    if (plan->last_backward.load(std::memory_order_relaxed) != task) {
        begin_backward(plan, slot);
        plan->last_backward.store(task, std::memory_order_relaxed);
    }
    if (plan->last_adds.load(std::memory_order_relaxed)) {
        refuse_late_addition(plan.get(), slot);
        return;
    }
    if (OF_GUARD(postpone) && is_known_to_others(param))
        return;
    int status = spend(plan.get(), slot);
    if (status == OF_NEEDS_STATE) {
        ask_python(plan.get(), OF_SHIM_STATE, slot);
        status = spend(plan.get(), slot);
    }
    check(plan.get(), slot, status);
}

struct GradientHook final : torch::autograd::PostAccumulateGradHook {
    std::shared_ptr<Plan> plan;
    size_t slot;
    Others others;

    void operator()(const at::Tensor &param) override {
        if (others)
            (*others)(param);
        const std::shared_ptr<Plan> keep = plan; // Python may drop this hook meanwhile
        if (!is_closed(keep.get()))
            update(keep, slot, param);
    }

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const override {
        throw Error("optfuse: backward fusion does not work under compiled autograd; use "
                    "optfuse.fuse(optimizer, mode=\"forward\")");
    }
};

// A tensor that never needed a gradient has no record to keep a hook in.
Others &hooks_of(const at::Tensor &param) {
    return torch::autograd::impl::materialize_autograd_meta(param)->post_acc_grad_hooks_;
}

GradientHook *find(const Plan *plan, const at::Tensor &param) {
    auto *hook = dynamic_cast<GradientHook *>(hooks_of(param).get());
    return hook != nullptr && (plan == nullptr || hook->plan.get() == plan) ? hook : nullptr;
}

// Without the hooks of optimizers that are no more, which would pile up.
Others living(Others hooks) {
    auto *hook = dynamic_cast<GradientHook *>(hooks.get());
    while (hook != nullptr && is_closed(hook->plan.get())) {
        hooks = Others(std::move(hook->others));
        hook = dynamic_cast<GradientHook *>(hooks.get());
    }
    return hooks;
}

} // namespace

bool lost_gradient_hook(const Plan *plan, const Slot *slot) {
    if (!OF_GUARD(recheck))
        return false;
    auto *meta = slot->param->autograd_meta();
    if (meta == nullptr)
        return true;
    auto *hook = dynamic_cast<GradientHook *>(
        static_cast<torch::autograd::AutogradMeta *>(meta)->post_acc_grad_hooks_.get());
    return hook == nullptr || hook->plan.get() != plan;
}

bool has_other_gradient_hook(const Plan *plan, const at::Tensor &param) {
    GradientHook *hook = find(nullptr, param);
    return hook != nullptr && hook->plan.get() != plan && !is_closed(hook->plan.get());
}

void attach_gradient_hook(const std::shared_ptr<Plan> &plan, Slot *slot, const at::Tensor &param) {
    if (GradientHook *mine = find(plan.get(), param)) {
        mine->slot = slot->index;
        return;
    }
    auto hook = std::make_unique<GradientHook>();
    hook->plan = plan;
    hook->slot = slot->index;
    hook->others = living(std::move(hooks_of(param)));
    torch::autograd::impl::set_post_acc_grad_hooks(param, std::move(hook));
}

void detach_gradient_hook(const Plan *plan, const at::Tensor &param) {
    if (GradientHook *mine = find(plan, param)) {
        Others others = std::move(mine->others);
        torch::autograd::impl::set_post_acc_grad_hooks(param, std::move(others));
    }
}

} // namespace optfuse
