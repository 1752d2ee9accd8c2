// SPDX-License-Identifier: BSD-3-Clause
// recompute.cpp: see recompute.h. The parameters that are updated already get the mark of pending
// updates as long as a forward pass is made once more, so that whoever uses one comes to
// first_use.cpp, which refuses it.
#include "autograd/recompute.h"

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "compat.h"
#include "plan.h"
#include "shim.h"
#include "tensor/memory.h"
#include "tensor/references.h"

namespace optfuse {
namespace {

struct Early {
    at::Tensor param;
    std::string label;
};

// The parameters that got the mark for each pass that this thread makes, one inside of the other.
std::vector<std::vector<Early>> &early_here() {
    thread_local std::vector<std::vector<Early>> all;
    return all;
}

void add_early(const Plan &plan, std::vector<Early> *early) {
    if (plan.mode != OF_BACKWARD || of_plan_unconfirmed(plan.core) == 0)
        return;
    for (const Slot *slot : plan.slots)
        if (of_plan_is_updated(plan.core, slot->index) && !has_mark(slot->param))
            early->push_back({reference_to(slot->param), slot->label});
}

} // namespace

const std::string *updated_too_early(const c10::TensorImpl *impl) {
    for (const std::vector<Early> &pass : early_here())
        for (const Early &early : pass)
            if (storage_of(early.param.unsafeGetTensorImpl()) == storage_of(impl))
                return &early.label;
    return nullptr;
}

} // namespace optfuse

extern "C" {

void of_shim_begin_recompute(of_shim_plan *const *plans, size_t n) {
    std::vector<optfuse::Early> early;
    for (size_t i = 0; i < n; i++)
        optfuse::add_early(*optfuse::plan_of(plans[i]), &early);
    for (const optfuse::Early &one : early)
        optfuse::mark(one.param.unsafeGetTensorImpl());
    optfuse::early_here().push_back(std::move(early));
}

void of_shim_end_recompute(void) {
    if (optfuse::early_here().empty())
        return;
    const std::vector<optfuse::Early> early = std::move(optfuse::early_here().back());
    optfuse::early_here().pop_back();
    for (const optfuse::Early &one : early)
        optfuse::unmark(one.param.unsafeGetTensorImpl());
}

} // extern "C"
