// SPDX-License-Identifier: BSD-3-Clause
#include "ledger/ledger.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "autograd/backward.h"
#include "base/device.h"
#include "base/error.h"
#include "guard.h"
#include "plan/slots.h"
#include "python/callback.h"
#include "shim.h"

namespace optfuse {

bool Ledger::has_updated() const {
    return plan.mode == OF_BACKWARD && of_shim_unconfirmed(handle_of(&plan));
}

// The CUDA graph that is being captured on this thread's stream of the plan's GPU; 0: none.
static uint64_t capture_here(const Plan &plan) {
    if (SteadyStreams::know_any())
        for (const Slot *slot : plan.slots)
            if (is_gpu(slot->param->device()))
                return current_stream(slot->param->device().index()).capture;
    return 0;
}

void Ledger::refuse_capture_without_backward() const {
    const uint64_t capture = has_updated() ? capture_here(plan) : 0;
    if (capture != 0 && capture != plan.captured_into && OF_GUARD(capture_step))
        fail("optfuse: step() is captured into a CUDA graph, but backward(), which was not, has "
             "already updated the parameters, so that replays of the graph would update nothing.\n"
             "Capture backward() as well, or use optfuse.fuse(optimizer, mode=\"forward\"). The "
             "updates stand, and a step() outside of the capture confirms them");
}

// ---- telling

void Ledger::rebuild(OptimizerReader &now) {
    const std::lock_guard<std::recursive_mutex> alone(plan.alone);
    now.check_rebuild();
    const bool late = has_updated();
    if (late)
        kept = late_changes(now, {false, false, false});
    const std::vector<const void *> before = now.parameters();
    std::unordered_set<const void *> with_entry;
    for (const size_t slot : inserted)
        if (slot < before.size())
            with_entry.insert(before[slot]);
    inserted.clear();
    numbers.clear();
    now.rebuild();
    if (!late)
        return;
    const std::vector<const void *> after = now.parameters(); // their slots may be others now
    for (size_t slot = 0; slot < after.size(); slot++)
        if (with_entry.count(after[slot]) != 0)
            note_entry(slot);
    now.tell_state(); // it must be known who writes to it
    note_used(now);
}

// Programs have counters in them, which step() advances for the parameters they are for.
void Ledger::sync_params(OptimizerReader &now, Look *look) {
    if (look->params || (counts_together() && has_updated()))
        return;
    rebuild(now);
    *look = now.look();
}

void Ledger::tell_options(OptimizerReader &now) {
    const size_t n = now.count_groups();
    for (size_t g = 0; g < n; g++) {
        std::vector<double> found = now.numbers(g);
        if (g < numbers.size() && first_difference(g, found) == found.size())
            continue;
        check(of_shim_group(handle_of(&plan), g, found.data(), found.size()));
        if (g == numbers.size())
            numbers.emplace_back();
        numbers[g] = std::move(found);
    }
    now.told_options();
}

size_t Ledger::first_difference(size_t then, const std::vector<double> &now) const {
    if (then >= numbers.size())
        return now.size(); // the last rebuild() has failed
    const std::vector<double> &known = numbers[then];
    size_t i = 0;
    while (i < now.size() && (known[i] == now[i] || (known[i] != known[i] && now[i] != now[i])))
        i++;
    return i;
}

void Ledger::tell(OptimizerReader &now, const Look &look) {
    if (!look.groups)
        tell_options(now);
    if (!look.state)
        now.tell_state();
}

void Ledger::make_state(OptimizerReader &now, size_t slot) {
    const std::lock_guard<std::recursive_mutex> guard(plan.telling);
    if (now.make_state(slot))
        note_entry(slot);
}

// Stock's step() inserts new entries in the order of the parameters.
void Ledger::put_in_order(OptimizerReader &now) {
    if (inserted.empty())
        return;
    std::sort(inserted.begin(), inserted.end());
    now.move_to_end(std::exchange(inserted, {}));
}

// ---- the two schedules

int Ledger::step_plan(OptimizerReader &now) {
    size_t missing = 0;
    needs.resize(plan.slots.size());
    of_shim_plan *handle = handle_of(&plan);
    const int status = of_shim_step(handle, needs.data(), needs.size(), &missing);
    if (status != OF_NEEDS_STATE)
        return status;
    for (size_t i = 0; i < missing; i++)
        make_state(now, needs[i]);
    return of_shim_step(handle, needs.data(), needs.size(), &missing);
}

void Ledger::create_updates(OptimizerReader &now, Look look) {
    // In an update of_shim_step() says what is wrong.
    const bool in_backward = plan.mode == OF_BACKWARD && !is_updating_here(&plan);
    if (!in_backward || has_unused_gradient(plan)) // else the next backward does it
        tell(now, look);
    now.prepare(look);
    if (in_backward && has_lost_gradient_hook(plan))
        now.attach();
    check(step_plan(now));
}

void Ledger::step(OptimizerReader &now, Look look) {
    const std::lock_guard<std::recursive_mutex> alone(plan.alone);
    refuse_capture_without_backward();
    refuse_late_changes(now, look, true);
    sync_params(now, &look);
    if (!now.begin(&look, false))
        return;
    try {
        create_updates(now, look);
    } catch (...) {
        now.end(false);
        throw;
    }
    now.end(true);
    put_in_order(now);
    confirm(now);
    if (counts_together() && !now.has_same_params())
        rebuild(now);
}

void Ledger::step_slot(OptimizerReader &now, size_t slot, bool at_once) {
    const std::lock_guard<std::recursive_mutex> alone(plan.alone);
    now.sync_slot(slot);
    int status = of_shim_step_slot(handle_of(&plan), slot, at_once);
    if (status == OF_NEEDS_STATE) {
        now.make_state(slot);
        status = of_shim_step_slot(handle_of(&plan), slot, at_once);
    }
    check(status);
}

// Each update is told of its own state.
void Ledger::begin_final(OptimizerReader &now, Look look) {
    const std::lock_guard<std::recursive_mutex> alone(plan.alone);
    sync_params(now, &look);
    if (!now.begin(&look, true))
        fail("optfuse: grad_scale or found_inf of the optimizer is set, which Backward(final=True) "
             "can't obey: it updates before all gradients are there. Set both to None, or use "
             "optfuse.fuse(optimizer, mode=\"forward\")");
    if (!look.groups)
        tell_options(now);
    now.prepare(look);
    if (has_lost_gradient_hook(plan))
        now.attach();
}

bool Ledger::zero_grad(OptimizerReader &now, bool has_same_params, bool may_drop) {
    const std::lock_guard<std::recursive_mutex> alone(plan.alone);
    if (has_updated())
        fail("optfuse: " + find_caller().place +
             "zero_grad() before step(): backward fusion has already applied the gradients that "
             "this would discard.\nCall step() first; or run passes that only add to the "
             "gradients, or whose gradients are thrown away, inside `with "
             "optfuse.accumulate(optimizer):`.\nWhere a step() is left out, use "
             "optfuse.fuse(optimizer, mode=\"forward\")");
    const bool in_backward = plan.mode == OF_BACKWARD;
    if (in_backward && !has_same_params)
        rebuild(now);
    if (in_backward)
        of_shim_restart_count(handle_of(&plan));
    if (!may_drop || !(in_backward || has_same_params))
        return false;
    now.drop_gradients();
    return true;
}

void Ledger::begin_pass(OptimizerReader &now, Look look) {
    if (plan.mode == OF_FINAL) {
        begin_final(now, look);
        return;
    }
    const std::lock_guard<std::recursive_mutex> guard(plan.telling);
    if (!look.params && OF_GUARD(groups))
        fail("optfuse: param_groups has other parameters than at the last step(), which a backward "
             "pass can't start to update; call zero_grad() after changing param_groups. Nothing "
             "was updated");
    refuse_late_changes(now, look, false);
    plan.captured_into = capture_here(plan);
    plan.is_left = !now.begin(&look, true);
    if (plan.is_left)
        return;
    tell(now, look);
    now.prepare(look);
    note_used(now);
}

} // namespace optfuse
