// SPDX-License-Identifier: BSD-3-Clause
// gradient_hook.cpp: backward fusion's entry. A parameter has one slot for a
// post-accumulate-grad hook; ours takes it and calls whatever was there first.
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <typeinfo>

#include "autograd/backward.h"
#include "base/compat.h"
#include "base/error.h"
#include "guard.h"
#include "plan/plan.h"

namespace optfuse {
namespace {

using Others = std::unique_ptr<torch::autograd::PostAccumulateGradHook>;

struct GradientHook final : torch::autograd::PostAccumulateGradHook {
    std::shared_ptr<Plan> plan;
    size_t slot;
    Others others;

    void operator()(const at::Tensor &param) override {
        if (others)
            (*others)(param);
        const std::shared_ptr<Plan> keep = plan; // Python may drop this hook meanwhile
        if (!is_closed(keep.get()))
            gradient_is_complete(keep, slot, param);
    }

    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &) const override {
        fail("optfuse: backward fusion does not work under compiled autograd; use "
             "optfuse.fuse(optimizer, mode=\"forward\")");
    }
};

// A tensor that never needed a gradient has no record to keep a hook in.
Others &hooks_of(const at::Tensor &param) {
    return torch::autograd::impl::materialize_autograd_meta(param)->post_acc_grad_hooks_;
}

// Every step asks this of every parameter, so the types themselves are compared: a final class
// has no subclasses.
GradientHook *as_ours(const Others &hook) {
    return hook && typeid(*hook) == typeid(GradientHook) ? static_cast<GradientHook *>(hook.get())
                                                         : nullptr;
}

GradientHook *find(const Plan *plan, const at::Tensor &param) {
    GradientHook *hook = as_ours(hooks_of(param));
    return hook != nullptr && (plan == nullptr || hook->plan.get() == plan) ? hook : nullptr;
}

// Drops the hooks of optimizers that no longer exist, which would pile up.
Others living(Others hooks) {
    for (auto *hook = as_ours(hooks); hook && is_closed(hook->plan.get()); hook = as_ours(hooks))
        hooks = Others(std::move(hook->others));
    return hooks;
}

bool has_hook(const Plan &plan, const Slot *slot) {
    auto *meta = slot->param->autograd_meta();
    if (meta == nullptr)
        return false;
    const GradientHook *hook =
        as_ours(static_cast<torch::autograd::AutogradMeta *>(meta)->post_acc_grad_hooks_);
    return hook != nullptr && hook->plan.get() == &plan;
}

} // namespace

bool has_lost_gradient_hook(const Plan &plan) {
    const auto has = [&](const Slot *slot) { return has_hook(plan, slot); };
    return OF_GUARD(recheck) && !std::all_of(plan.slots.begin(), plan.slots.end(), has);
}

namespace {

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

} // namespace

void attach(Plan &plan, const std::vector<at::Tensor> &params) {
    for (size_t i = 0; i < params.size(); i++)
        if (has_other_gradient_hook(&plan, params[i]))
            fail("optfuse: " + plan.slots[i]->label +
                 " already belongs to another optimizer in backward mode; use "
                 "mode=\"forward\" for both, or unfuse the other first");
    for (size_t i = 0; i < params.size(); i++)
        attach_gradient_hook(plan.self, plan.slots[i], params[i]);
}

void detach_gradient_hook(const Plan *plan, const at::Tensor &param) {
    if (GradientHook *mine = find(plan, param)) {
        Others others = std::move(mine->others);
        torch::autograd::impl::set_post_acc_grad_hooks(param, std::move(others));
    }
}

} // namespace optfuse
