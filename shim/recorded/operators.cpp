// SPDX-License-Identifier: BSD-3-Clause
// operators.cpp: backward mode's operators, by which Python begins and ends a step() that runs ahead of
// its gradients. `plan` is the address of an of_shim_plan.
#include <torch/library.h>

#include <string>
#include <utility>
#include <vector>

#include "native/native.h"
#include "plan/arguments.h"
#include "plan/plan.h"
#include "plan/slots.h"
#include "python/gil.h"
#include "recorded/ahead.h"

namespace optfuse::recorded {
namespace {

// Stand-ins for the gradients of this pass; none if the pass must be left to step().
std::vector<at::Tensor> begin_ahead(int64_t address) {
    const Plan &plan = plan_at(address);
    Ahead &ahead = ahead_of(plan_at(address));
    return ahead.can_begin(plan) ? ahead.stand_ins(plan) : std::vector<at::Tensor>();
}

bool has_begun_here(int64_t address) { return ahead_of(plan_at(address)).has_begun_here(); }

std::vector<int64_t> unexpected(int64_t address) {
    const Plan &plan = plan_at(address);
    const std::vector<size_t> found = ahead_in(plan)->unexpected(plan);
    return {found.begin(), found.end()};
}

std::vector<int64_t> written_numbers(int64_t address) {
    return ahead_of(plan_at(address)).written_numbers();
}

void confirm_ahead(int64_t address) { ahead_of(plan_at(address)).confirm(); }

void end_ahead(int64_t address) { ahead_of(plan_at(address)).end(); }

void leave_to_step(int64_t address, std::string why) {
    if (Ahead *const ahead = ahead_in(plan_at(address)))
        ahead->why = std::move(why);
}

// The tensors that updates of this step read and write beside parameters and gradients.
std::vector<at::Tensor> tensors_ahead(int64_t address) {
    std::vector<at::Tensor> found;
    for (const Slot *slot : plan_at(address).slots)
        each_state(*slot, [&found](const at::Tensor &state) { found.push_back(state); });
    return found;
}

std::string why_not_ahead(int64_t address) {
    const Ahead *const ahead = ahead_in(plan_at(address));
    return ahead != nullptr ? ahead->why : "";
}

// The updates of this plan's slots are made by the class's own step(), which takes the GIL; native: a name
// of native/native.h, or nothing.
void run_own_step(int64_t address, const std::string &native) {
    static const auto own = [] {
        const auto made = std::make_shared<Program>();
        made->core.by_host = made->is_own = true;
        return std::shared_ptr<const Program>(made);
    }();
    updates_take_the_gil();
    Plan &plan = plan_at(address);
    plan.native = native_update(native);
    for (Slot *slot : plan.slots)
        slot->program = own;
}

// The options of each group, for native updates.
void set_numbers(int64_t address, int64_t n_numbers, const std::vector<double> &numbers) {
    auto &all = plan_at(address).numbers;
    all.clear();
    for (auto at = numbers.begin(); at != numbers.end(); at += n_numbers)
        all.emplace_back(at, at + n_numbers);
}

// The tensors of a slot's state.
void know_state(int64_t address, int64_t index, std::vector<at::Tensor> state) {
    Slot &slot = slot_at(plan_at(address), index);
    slot.own = std::move(state);
    note_versions(slot);
}

} // namespace
} // namespace optfuse::recorded

TORCH_LIBRARY_FRAGMENT(optfuse, m) {
    using namespace optfuse::recorded;
    m.def("begin_ahead(int plan) -> Tensor[]", begin_ahead);
    m.def("has_begun_here(int plan) -> bool", has_begun_here);
    m.def("unexpected(int plan) -> int[]", unexpected);
    m.def("tensors_ahead(int plan) -> Tensor[]", tensors_ahead);
    m.def("written_numbers(int plan) -> int[]", written_numbers);
    m.def("confirm_ahead(int plan) -> ()", confirm_ahead);
    m.def("end_ahead(int plan) -> ()", end_ahead);
    m.def("leave_to_step(int plan, str why) -> ()", leave_to_step);
    m.def("why_not_ahead(int plan) -> str", why_not_ahead);
    m.def("run_own_step(int plan, str native) -> ()", run_own_step);
    m.def("set_numbers(int plan, int n_numbers, float[] numbers) -> ()", set_numbers);
    m.def("know_state(int plan, int slot, Tensor[] state) -> ()", know_state);
}
