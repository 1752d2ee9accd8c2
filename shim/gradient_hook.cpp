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
#include "tensors.h"

namespace optfuse {

of_shim_callback *python_callback = nullptr;

namespace {

using Others = std::unique_ptr<torch::autograd::PostAccumulateGradHook>;

void check(int status, const Slot *slot) {
    if (status == OF_OK)
        return;
    const std::string text = of_error_message();
    throw Error("optfuse: " + (text.find(slot->label) == std::string::npos
                                   ? slot->label + ": " + text
                                   : text));
}

void ask_python(Plan *plan, of_shim_event event, const Slot *slot);

struct GradientHook final : torch::autograd::PostAccumulateGradHook {
    std::shared_ptr<Plan> plan;
    size_t slot;
    Others others;

    void operator()(const at::Tensor &param) override {
        if (others)
            (*others)(param);
        if (!plan->closed.load(std::memory_order_acquire))
            update(plan->slots[slot], param);
    }

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const override {
        throw Error("optfuse: backward fusion does not work under compiled autograd; use "
                    "optfuse.fuse(optimizer, mode=\"forward\")");
    }

    void begin_backward(const Slot *first) {
        if (OF_GUARD(create_graph) && c10::GradMode::is_enabled())
            throw Error("optfuse: backward(create_graph=True) needs the weights and gradients "
                        "of this backward later, but backward fusion updates them at once (seen at " +
                        first->label + "); use optfuse.fuse(optimizer, mode=\"forward\")");
        ask_python(plan.get(), OF_SHIM_BACKWARD, first);
        std::shared_ptr<Plan> keep = plan;
        torch::autograd::Engine::get_default_engine().queue_callback([keep] {
            if (!keep->closed.load(std::memory_order_acquire))
                of_plan_close(keep->core);
        });
    }

    void refuse_later_reduction(const Slot *here, const at::Tensor &param) {
        if (!OF_GUARD(ddp))
            return;
        const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(param);
        if (accumulator && !accumulator->post_hooks().empty())
            throw Error("optfuse: the gradient of " + here->label +
                        " is changed after it is complete (DistributedDataParallel reduces it "
                        "between processes), so backward fusion would use the wrong one; use "
                        "optfuse.fuse(optimizer, mode=\"forward\")");
    }

    void update(Slot *here, const at::Tensor &param) {
        refuse_later_reduction(here, param);
        const int task = torch::autograd::get_current_graph_task_id();
        if (plan->last_backward.load(std::memory_order_relaxed) != task) {
            begin_backward(here);
            plan->last_backward.store(task, std::memory_order_relaxed);
        }
        int status = of_plan_gradient(plan->core, here->index);
        if (status == OF_NEEDS_STATE) {
            ask_python(plan.get(), OF_SHIM_STATE, here);
            status = of_plan_gradient(plan->core, here->index);
        }
        check(status, here);
    }
};

void ask_python(Plan *plan, of_shim_event event, const Slot *slot) {
    if (python_callback(handle_of(plan), event, slot->index) != 0)
        throw Error(std::string("optfuse: ") + of_error_message());
}

GradientHook *find(const Plan *plan, const at::Tensor &param) {
    auto *hook = dynamic_cast<GradientHook *>(
        torch::autograd::impl::post_acc_grad_hooks(param).get());
    return hook != nullptr && (plan == nullptr || hook->plan.get() == plan) ? hook : nullptr;
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
    return hook != nullptr && hook->plan.get() != plan &&
           !hook->plan->closed.load(std::memory_order_acquire);
}

void attach_gradient_hook(const std::shared_ptr<Plan> &plan, Slot *slot, const at::Tensor &param) {
    if (GradientHook *mine = find(plan.get(), param)) {
        mine->slot = slot->index;
        return;
    }
    auto hook = std::make_unique<GradientHook>();
    hook->plan = plan;
    hook->slot = slot->index;
    hook->others = std::move(torch::autograd::impl::post_acc_grad_hooks(param));
    torch::autograd::impl::set_post_acc_grad_hooks(param, std::move(hook));
}

void detach_gradient_hook(const Plan *plan, const at::Tensor &param) {
    if (GradientHook *mine = find(plan, param)) {
        Others others = std::move(mine->others);
        torch::autograd::impl::set_post_acc_grad_hooks(param, std::move(others));
    }
}

} // namespace optfuse
