// SPDX-License-Identifier: BSD-3-Clause
// late.cpp: changes between backward() and step() in backward mode, which stock's step() would
// obey but come after the update: what the updates used is compared, parameter by parameter, with
// what step() would use now.
#include <map>
#include <utility>

#include "base/error.h"
#include "guard.h"
#include "ledger/ledger.h"
#include "plan/slots.h"
#include "python/callback.h"
#include "recorded/ahead.h"
#include "shim.h"

namespace optfuse {

void Ledger::note_used(OptimizerReader &now) {
    has_begun = true;
    now.note_used();
}

void Ledger::confirm(OptimizerReader &now) {
    const bool complained = !said.empty();
    has_begun = false;
    kept.clear();
    said.clear();
    inserted.clear();
    now.confirmed(complained);
}

// A step() that runs ahead advances the counters of all parameters that have a gradient.
bool Ledger::counts_together() const {
    return plan.ahead != nullptr;
}

bool Ledger::is_updated(size_t slot) const {
    const bool is_bound = counts_together() && plan.slots[slot]->param->grad().defined();
    return is_bound || of_shim_is_updated(handle_of(&plan), slot);
}

void Ledger::refuse_late_changes(OptimizerReader &now, const Look &look, bool at_step) {
    const bool is_used =
        has_updated() || (counts_together() && recorded::ahead_in(plan)->has_begun());
    if (!has_begun || !is_used || !OF_GUARD(late))
        return;
    const std::vector<std::string> found = late_changes(now, look);
    std::vector<std::string> unsaid;
    std::unordered_set<std::string> known = said;
    for (const std::string &text : found)
        if (known.insert(text).second)
            unsaid.push_back(text);
    if (unsaid.empty())
        return;
    if (at_step)
        said = std::move(known);
    const std::string n = std::to_string(unsaid.size());
    fail("optfuse: " + unsaid.front() +
         " between backward() and step(), but backward fusion has already updated with the old "
         "value" +
         (unsaid.size() > 1 ? " (one of " + n + " such changes)" : "") +
         "; do this after step(), or use optfuse.fuse(optimizer, mode=\"forward\"). The update "
         "stands, and the next step() confirms it");
}

std::vector<std::string> Ledger::late_changes(OptimizerReader &now, const Look &look) {
    std::vector<std::string> found = kept;
    const std::string attribute = now.changed_attribute();
    if (!attribute.empty())
        found.push_back(attribute);
    if (!look.groups)
        find_changed_groups(now, &found);
    if (OF_GUARD(late_state) && !now.has_used_state(look))
        find_changed_state(now, &found);
    find_written(&found);
    return found;
}

void Ledger::find_changed_groups(OptimizerReader &now, std::vector<std::string> *found) {
    if (counts_together() && !now.has_same_params()) {
        found->push_back("param_groups, with which " + plan.slots[0]->label +
                         " counts, was changed");
        return;
    }
    const std::vector<size_t> groups = now.groups_now();
    std::map<std::pair<size_t, size_t>, std::string> changed;
    for (const Slot *slot : plan.slots) {
        if (slot->index >= groups.size() || !is_updated(slot->index))
            continue; // not known: rebuild() has failed half-way
        const std::pair<size_t, size_t> moved(slot->group, groups[slot->index]);
        if (moved.second == OptimizerReader::kNoGroup) {
            if (OF_GUARD(late_groups))
                found->push_back(slot->label + " was taken out of param_groups");
            continue;
        }
        if (changed.count(moved) == 0)
            changed[moved] = now.changed_option(moved.first, moved.second);
        if (!changed[moved].empty())
            found->push_back("the option '" + changed[moved] + "' of " + slot->label +
                             " was changed");
    }
}

void Ledger::find_changed_state(OptimizerReader &now, std::vector<std::string> *found) {
    const size_t n = now.parameters().size(); // fewer: rebuild() has failed half-way
    for (const Slot *slot : plan.slots)
        if (slot->index < n && is_updated(slot->index)) {
            const std::string text = now.changed_state(slot->index);
            if (!text.empty())
                found->push_back(text);
        }
}

// Launches first what is still pending for a side stream: its update notes the versions then.
void Ledger::find_written(std::vector<std::string> *found) const {
    if (is_updating_here(&plan) || !OF_GUARD(written))
        return; // in an update of_shim_step() says what is wrong
    of_plan_close(plan.core);
    for (const Slot *slot : plan.slots) {
        const auto is_param = [slot] { return slot->version != param_version(*slot); };
        const auto is_written = [&] {
            return is_param() || slot->state_version != state_version(*slot);
        };
        // Another thread may be in the middle of its update, for which the second question waits.
        if (is_written() && of_plan_is_updated(plan.core, slot->index) && is_written())
            found->push_back((is_param() ? "" : "the state of ") + slot->label +
                             " was written in place");
    }
}

} // namespace optfuse
