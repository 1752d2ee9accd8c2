// SPDX-License-Identifier: BSD-3-Clause
#include "tensor/overlap.h"

#include <algorithm>
#include <functional>

#include "plan.h"
#include "tensor/gradient.h"
#include "tensor/memory.h"
#include "tensor/refuse.h"

namespace optfuse {
namespace {

bool comes_before(const Written &a, const Written &b) {
    return std::less<>()(a.storage, b.storage);
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
        if (writes_gradient(slot))
            add_written(&all, slot, gradient_of(slot->param), Written::GRADIENT);
    }
    std::sort(all.begin(), all.end(), comes_before);
    return all;
}

} // namespace

Overlap overlap_of(const Slot *slot, const c10::TensorImpl *tensor) {
    Overlap found;
    const std::vector<Written> &all = written_by(slot->plan);
    const Written key = {storage_of(tensor), tensor, 0, Written::PARAM};
    const auto [first, last] = std::equal_range(all.begin(), all.end(), key, comes_before);
    for (auto it = first; it != last; ++it) {
        if (it->slot == slot->index || !meet(it->tensor, tensor))
            continue;
        if (it->kind == Written::GRADIENT) {
            found.gradient = true;
            continue;
        }
        const bool is_state = it->kind == Written::STATE;
        found.state |= is_state;
        (it->slot < slot->index ? found.before : found.behind) = true;
        found.state_behind |= is_state && it->slot > slot->index;
    }
    return found;
}

Overlap overlap_of_gradient(const Slot *slot, const c10::TensorImpl *gradient) {
    const bool is_alone = is_promise(gradient) || is_private(storage_of(gradient), 0);
    return is_alone ? Overlap() : overlap_of(slot, gradient);
}

of_found refuse_between(const Slot *slot) {
    return refuse(slot, "the gradient of ",
                  "shares memory with several other parameters or their state",
                  ", which are updated before and after it: put its clone() there");
}

} // namespace optfuse
