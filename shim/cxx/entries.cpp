// SPDX-License-Identifier: BSD-3-Clause
// entries.cpp: the state of a fused optimizer. The tensors in its entries are those of the plan;
// counters are copied.
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>

#include <utility>

#include "base/plain_mode.h"
#include "cxx/optimizer.h"
#include "memory/memory.h"
#include "plan/slots.h"

namespace optfuse {
namespace {

int64_t count_in(const at::Tensor &counter) {
    return static_cast<int64_t>(
        *static_cast<const float *>(data_of(counter.unsafeGetTensorImpl())));
}

} // namespace

std::optional<StateEntry> FusedOptimizer::entry_of(size_t slot) const {
    const auto &state = optimizer.state();
    const auto found = state.find(members[slot].param.unsafeGetTensorImpl());
    if (found == state.end() || !found->second)
        return std::nullopt;
    return row.look_into(*found->second);
}

bool FusedOptimizer::is_told(size_t slot, const std::optional<StateEntry> &entry) const {
    const Slot *known = shared->slots[slot];
    for (size_t i = 0; i < shared->rule->n_state; i++)
        if (!known->state[i].is_same(entry ? *entry->tensors[i] : at::Tensor()))
            return false;
    if (!entry || entry->step == nullptr)
        return !known->step.defined();
    return known->step.defined() && *entry->step == members[slot].step;
}

void FusedOptimizer::tell_state() {
    for (size_t slot = 0; slot < members.size(); slot++) {
        const std::optional<StateEntry> entry = entry_of(slot);
        if (!is_told(slot, entry))
            tell_entry(slot, entry, false);
    }
}

std::string FusedOptimizer::changed_state(size_t slot) {
    const bool is_same = is_told(slot, entry_of(slot));
    return is_same ? "" : "the state of " + shared->slots[slot]->label + " was replaced";
}

// is_new: it has been made for this update.
void FusedOptimizer::tell_entry(size_t slot, const std::optional<StateEntry> &entry, bool is_new) {
    Slot *told = shared->slots[slot];
    if (!is_new)
        flush(); // what is pending is for the old one
    std::vector<std::optional<at::Tensor>> tensors(shared->rule->n_state);
    for (size_t i = 0; entry && i < tensors.size(); i++)
        if (entry->tensors[i]->defined())
            tensors[i] = *entry->tensors[i];
    std::optional<at::Tensor> step;
    if (entry && entry->step != nullptr) {
        const PlainMode plain;
        step = at::full({}, static_cast<double>(*entry->step), at::kFloat);
        members[slot].step = *entry->step;
    }
    set_state(*told, tensors, step, is_new);
}

// As PyTorch's fused updates do at a parameter's first gradient.
bool FusedOptimizer::make_state(size_t slot) {
    const unsigned used = of_plan_state_used(shared->core, slot);
    const double initial = row.initial(optimizer.defaults());
    auto entry = row.make_entry();
    auto &place = optimizer.state()[members[slot].param.unsafeGetTensorImpl()];
    const StateEntry now = row.look_into(place ? *place : *entry);
    at::Tensor made[OF_MAX_STATE];
    for (size_t i = 0; i < shared->rule->n_state; i++)
        if ((used >> i & 1u) != 0 && !now.tensors[i]->defined()) {
            const PlainMode plain;
            const at::Tensor &param = members[slot].param;
            made[i] = at::full_like(param, initial, param.options(), at::MemoryFormat::Preserve);
        }
    for (size_t i = 0; i < shared->rule->n_state; i++)
        if (made[i].defined())
            *now.tensors[i] = made[i];
    const bool is_absent = !place;
    if (is_absent)
        place = std::move(entry);
    tell_entry(slot, now, true);
    return is_absent;
}

// The entry's counter gets what the plan's has become, unless the program has put another entry
// or another number there meanwhile.
void FusedOptimizer::write_counters() {
    for (size_t slot = 0; slot < members.size(); slot++) {
        const at::Tensor &counter = shared->slots[slot]->step;
        if (!counter.defined())
            continue;
        const std::optional<StateEntry> entry = entry_of(slot);
        if (is_told(slot, entry))
            members[slot].step = *entry->step = count_in(counter);
    }
}

} // namespace optfuse
