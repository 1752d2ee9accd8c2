// SPDX-License-Identifier: BSD-3-Clause
#include "plan/slots.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "memory/gradient.h"
#include "memory/heap.h"
#include "memory/proxies.h"
#include "plan/scalars.h"

namespace optfuse {

Plan::Plan() : scalars(std::make_unique<DeviceScalars>()) {}

Plan::~Plan() {
    of_plan_release(core);
    if (uses_heap.load(std::memory_order_relaxed))
        of_heap_leave();
}

namespace {

// The slots of all plans by their parameters. Never freed: nothing of ours may run at process exit.
std::mutex slots_lock; // guards slots_by_param
using SlotsByParam = std::unordered_multimap<const c10::TensorImpl *, Slot *>;
SlotsByParam &slots_by_param = *new SlotsByParam;

void know_slot(Slot *slot) {
    const std::lock_guard<std::mutex> guard(slots_lock);
    slots_by_param.emplace(slot->param, slot);
}

void forget_slot(const Slot *slot) {
    const std::lock_guard<std::mutex> guard(slots_lock);
    const auto [first, last] = slots_by_param.equal_range(slot->param);
    const auto is_it = [slot](const auto &entry) { return entry.second == slot; };
    const auto found = std::find_if(first, last, is_it);
    if (found != last)
        slots_by_param.erase(found);
}

// Any one, if several optimizers in forward mode have the parameter; null, if none has.
bool find_slot(const c10::TensorImpl *param, const Slot **slot) {
    const auto [first, last] = slots_by_param.equal_range(param);
    for (auto entry = first; entry != last; ++entry) {
        const Plan *plan = entry->second->plan;
        if (plan->mode != OF_FORWARD || !plan->folds)
            return false;
    }
    *slot = first == last ? nullptr : first->second;
    return true;
}

} // namespace

bool find_slots(const std::vector<at::Tensor> &params, FoundSlots *found) {
    const std::lock_guard<std::mutex> guard(slots_lock);
    bool is_any = false;
    found->slots.reserve(params.size());
    for (const at::Tensor &param : params) {
        const Slot *slot = nullptr;
        c10::TensorImpl *impl = param.unsafeGetTensorImpl();
        if (!gradient_of(impl).defined())
            continue;
        if (!find_slot(impl, &slot))
            return false;
        is_any = is_any || slot != nullptr;
        if (slot != nullptr && (found->plans.empty() || found->plans.back().get() != slot->plan))
            found->plans.push_back(slot->plan->self);
        found->slots.push_back(slot != nullptr ? FoundSlots::Found{slot->plan, impl, slot->index}
                                               : FoundSlots::Found{nullptr, impl, 0});
    }
    return is_any;
}

void lock_slots() {
    slots_lock.lock();
}

void unlock_slots() {
    slots_lock.unlock();
}

void add_slot(Plan &plan, const at::Tensor &param, size_t group, bool eager, int64_t tried,
              std::string label) {
    auto *slot = new Slot(param);
    slot->plan = &plan;
    slot->group = group;
    slot->tried = tried;
    slot->label = std::move(label);
    // The core owns the slot from here on, also when this fails.
    check(of_plan_add_slot(plan.core, slot, group, eager, &slot->index));
    plan.slots.push_back(slot);
    know_slot(slot);
}

void set_used(Slot &slot, uint64_t used) {
    of_plan_set_updated(slot.plan->core, slot.index);
    slot.used = used;
}

Slot::~Slot() {
    remove_proxies(wrapped, Proxies(wrappers.begin(), wrappers.end()));
    forget_slot(this);
}

void set_state(Slot &slot, const std::vector<std::optional<at::Tensor>> &state,
               const std::optional<at::Tensor> &step, bool first) {
    const of_rule *rule = slot.plan->rule;
    if (state.size() != rule->n_state + rule->n_counters)
        fail("optfuse: a wrong number of state tensors");
    for (size_t i = 0; i < rule->n_state; i++)
        slot.state[i] = state[i] ? *state[i] : at::Tensor();
    for (size_t i = 0; i < rule->n_counters; i++)
        slot.counters[i] = state[rule->n_state + i] ? *state[rule->n_state + i] : at::Tensor();
    slot.step = step ? *step : at::Tensor();
    slot.first = first;
    note_versions(slot);
}

// As backward usually leaves it no lock has to be taken for each slot.
bool has_unused_gradient(const Plan &plan) {
    if (of_plan_unconfirmed(plan.core) == plan.slots.size())
        return false;
    return std::any_of(plan.slots.begin(), plan.slots.end(), [&](const Slot *slot) {
        return !of_plan_is_updated(plan.core, slot->index) && slot->param->grad().defined();
    });
}

// The gradients die together at the end. A finalizer may then call the optimizer.
void drop_gradients(Plan &its) {
    const std::shared_ptr<Plan> plan = its.self;
    std::vector<at::Tensor> dying = std::move(plan->dying);
    for (const Slot *slot : plan->slots)
        if (at::Tensor grad = take_gradient(slot->param); grad.defined())
            dying.push_back(std::move(grad));
    dying.clear();
    plan->dying = std::move(dying);
}

bool shares_state(const Slot &slot) {
    constexpr size_t kOwn = 2;
    bool is_shared = false;
    each_state(slot, [&is_shared](const at::Tensor &t) { is_shared |= t.use_count() > kOwn; });
    return is_shared;
}

uint64_t param_version(const Slot &slot) {
    return version_of(slot.param) + (slot.wrappers.empty() ? 0 : version_of(slot.wrappers[0]));
}

uint64_t state_version(const Slot &slot) {
    uint64_t sum = 0;
    each_state(slot, [&sum](const at::Tensor &t) { sum += version_of(t.unsafeGetTensorImpl()); });
    for (size_t i = 1; i < slot.wrappers.size(); i++)
        sum += version_of(slot.wrappers[i]);
    return sum;
}

void note_versions(Slot &slot) {
    slot.version = param_version(slot);
    slot.state_version = state_version(slot);
}

} // namespace optfuse
