// SPDX-License-Identifier: BSD-3-Clause
// recomputed.cpp: forward passes inside of backward, as activation checkpointing makes them. In stock
// they read the weights of the first forward pass, since step() comes later; backward fusion may
// have updated some by then. These, and their state, get the mark of pending updates, so that an
// operator that uses one is refused. Nobody takes a mark off while such a pass is made; it goes with
// the next use of the tensor behind all of them.
#include <ATen/core/Tensor.h>

#include <exception>
#include <utility>
#include <vector>

#include "absent/kinds.h"
#include "base/compat.h"
#include "base/error.h"
#include "memory/memory.h"
#include "plan/plan.h"
#include "plan/references.h"
#include "shim.h"

namespace optfuse {
namespace {

struct Early {
    at::Tensor tensor;
    const Plan *plan; // its optimizer is kept by who makes the pass
    size_t slot;
    bool is_state;
};

// For each of the passes that this thread makes, one inside of the other.
std::vector<std::vector<Early>> &early_here() {
    thread_local std::vector<std::vector<Early>> all;
    return all;
}

// A local tensor's DTensor, too: inside of its dispatch nobody looks at the local tensor's mark.
void add_written_by(const Slot *slot, std::vector<Early> *early) {
    const auto add = [&](const at::Tensor &tensor, bool is_state) {
        if (tensor.has_storage())
            early->push_back({tensor, slot->plan, slot->index, is_state});
    };
    add(reference_to(slot->param), false);
    each_state(*slot, [&](const at::Tensor &tensor) { add(tensor, true); });
    for (size_t i = 0; i < slot->wrappers.size(); i++)
        add(reference_to(slot->wrappers[i]), i > 0);
}

void add_early(const Plan &plan, std::vector<Early> *early) {
    if (plan.mode != OF_BACKWARD || of_plan_unconfirmed(plan.core) == 0)
        return;
    for (const Slot *slot : plan.slots)
        if (of_plan_is_updated(plan.core, slot->index))
            add_written_by(slot, early);
}

std::string label_of(const Early &early) {
    const std::vector<Slot *> &slots = early.plan->slots;
    const std::string label = early.slot < slots.size() ? slots[early.slot]->label : "a parameter";
    return early.is_state ? "the state of " + label : label;
}

// Before anything is launched: an update may be pending behind its gradient.
[[noreturn]] void refuse_early(const char *op, const Early &early) {
    fail("optfuse: " + std::string(op) + " reads " + label_of(early) +
         " in a block that activation checkpointing computes once more inside backward(), but the "
         "parameter's gradient was complete before, and backward fusion has already updated it.\n"
         "Read it outside of the block and give it to the block as an argument, or use "
         "optfuse.fuse(optimizer, mode=\"forward\")");
}

Run answer_recomputed(const char *op, c10::TensorImpl *impl, bool) {
    for (const std::vector<Early> &pass : early_here())
        for (const Early &early : pass)
            if (storage_of(early.tensor.unsafeGetTensorImpl()) == storage_of(impl) &&
                !makes_another(op))
                refuse_early(op, early);
    return nullptr;
}

} // namespace

const Absent absent::recomputed = {nullptr, answer_recomputed};

} // namespace optfuse

extern "C" {

int of_shim_begin_recompute(of_shim_plan *const *plans, size_t n) {
    try {
        std::vector<optfuse::Early> early;
        for (size_t i = 0; i < n; i++)
            optfuse::add_early(*optfuse::plan_of(plans[i]), &early);
        optfuse::early_here().push_back(std::move(early));
    } catch (const std::exception &e) {
        of_set_error("%s", e.what());
        return OF_REFUSED;
    }
    optfuse::marks_wanted++;
    for (const optfuse::Early &one : optfuse::early_here().back())
        optfuse::mark(one.tensor.unsafeGetTensorImpl());
    return OF_OK;
}

void of_shim_end_recompute(void) {
    if (optfuse::early_here().empty())
        return;
    optfuse::early_here().pop_back();
    optfuse::marks_wanted--;
}

} // extern "C"
