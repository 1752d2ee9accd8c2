// SPDX-License-Identifier: BSD-3-Clause
#include "plan/overlap.h"

#include <algorithm>
#include <functional>

#include "base/device.h"
#include "memory/gradient.h"
#include "memory/memory.h"
#include "plan/plan.h"
#include "plan/refuse.h"

namespace optfuse {
namespace {

// State comes first: a storage may have many parameters.
bool comes_before(const Written &a, const Written &b) {
    return a.storage != b.storage ? std::less<>()(a.storage, b.storage) : a.kind < b.kind;
}

void add_written(std::vector<Written> *all, const Slot *slot, const at::Tensor &tensor,
                 Written::Kind kind) {
    const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    if (tensor.defined() && impl->layout() == c10::kStrided && impl->has_storage())
        all->push_back({storage_of(impl), impl, slot->index, kind});
}

// Made at the first question of a step().
const std::vector<Written> &written_by(Plan *plan) {
    std::vector<Written> &all = plan->written;
    if (!all.empty())
        return all;
    for (const Slot *slot : plan->slots) {
        if (slot->param->layout() == c10::kStrided && slot->param->has_storage())
            all.push_back({storage_of(slot->param), slot->param, slot->index, Written::PARAM});
        for (const at::Tensor &state : slot->state)
            add_written(&all, slot, state, Written::STATE);
        for (const at::Tensor &state : slot->own)
            add_written(&all, slot, state, Written::STATE);
        if (step_is_on_gpu(slot))
            add_written(&all, slot, slot->step, Written::STATE);
        if (writes_gradient(slot))
            add_written(&all, slot, gradient_of(slot->param), Written::GRADIENT);
    }
    std::sort(all.begin(), all.end(), comes_before);
    return all;
}

// The tensors up to this kind that other slots write to the memory of this one.
template <typename Visit>
void each_written_to(const Slot *slot, const c10::TensorImpl *tensor, Written::Kind last,
                     const Visit &visit) {
    const std::vector<Written> &all = written_by(slot->plan);
    const Written from = {storage_of(tensor), tensor, 0, Written::STATE};
    const Written to = {storage_of(tensor), tensor, 0, last};
    auto it = std::lower_bound(all.begin(), all.end(), from, comes_before);
    const auto end = std::upper_bound(it, all.end(), to, comes_before);
    for (; it != end; ++it)
        if (it->slot != slot->index && meet(it->tensor, tensor))
            visit(*it);
}

} // namespace

Overlap overlap_of(const Slot *slot, const c10::TensorImpl *tensor) {
    Overlap found;
    each_written_to(slot, tensor, Written::PARAM, [&](const Written &other) {
        if (other.kind == Written::GRADIENT) {
            found.gradient = true;
            return;
        }
        const bool is_behind = other.slot > slot->index;
        (is_behind ? found.behind : found.before) = true;
        found.state_behind |= is_behind && other.kind == Written::STATE;
    });
    return found;
}

bool is_in_other_state(const Slot *slot, const c10::TensorImpl *tensor) {
    bool found = false;
    each_written_to(slot, tensor, Written::STATE, [&](const Written &) { found = true; });
    return found;
}

Overlap overlap_of_gradient(const Slot *slot, const c10::TensorImpl *gradient) {
    const bool is_alone =
        is_absent(gradient) || (is_private(storage_of(gradient), 0) && is_held_once(gradient));
    return is_alone ? Overlap() : overlap_of(slot, gradient);
}

of_found refuse_between(const Slot *slot) {
    return refuse(slot, "the gradient of ",
                  "shares memory with several other parameters or their state",
                  ", which are updated before and after it: put its clone() there");
}

of_found check_on_gpu(const Slot *slot, const Overlap &written) {
    if (!is_gpu(slot->param->device()) || !written.is_any())
        return OF_FOUND_INPUTS;
    return refuse(slot, "the gradient of ", "shares memory with another parameter or its state",
                  ", and on a GPU PyTorch updates both in one launch, which reads the gradient "
                  "before or after: put its clone() there");
}

} // namespace optfuse
