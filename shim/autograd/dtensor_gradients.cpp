// SPDX-License-Identifier: BSD-3-Clause
// dtensor_gradients.cpp: the gradients of DTensor parameters, as the library gets to see them.
#include "autograd/dtensor_gradients.h"

#include <algorithm>

#include "absent/consumed.h"
#include "autograd/backward.h"
#include "guard.h"
#include "memory/memory.h"
#include "plan/references.h"
#include "plan/slots.h"

namespace optfuse {
namespace {

void forget_gradient(Slot *slot) {
    slot->gradient_is_known = false;
    slot->gradient_wrapper = nullptr;
    at::Tensor &grad = slot->param->mutable_grad();
    if (grad.defined() && !is_consumed(grad.unsafeGetTensorImpl()))
        grad.reset();
}

using Impls = std::vector<const c10::TensorImpl *>;

// Tensors over one memory: a collective's output, and views of it.
struct Users {
    Impls tensors, bases; // each view adds its base to both
};

void add_users(const c10::StorageImpl *memory, const std::vector<at::Tensor> &of, Users *users) {
    const auto uses = [memory](const at::TensorBase &tensor) {
        const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
        return impl->has_storage() && storage_of(impl) == memory;
    };
    for (const at::Tensor &tensor : of) {
        const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
        if (!uses(tensor) || std::find(users->tensors.begin(), users->tensors.end(), impl) !=
                                 users->tensors.end())
            continue;
        users->tensors.push_back(impl);
        if (tensor.is_view() && uses(tensor._base()))
            users->bases.push_back(tensor._base().unsafeGetTensorImpl());
    }
}

// Somebody has the collective's output itself, as a buffer that is used again.
bool is_buffer(const Impls &bases) {
    const auto is_kept = [&bases](const c10::TensorImpl *base) {
        const size_t views = static_cast<size_t>(std::count(bases.begin(), bases.end(), base));
        const size_t held = c10::raw::intrusive_ptr::use_count(const_cast<c10::TensorImpl *>(base));
        return held > views + idle_references(*base);
    };
    return OF_GUARD(base) && std::any_of(bases.begin(), bases.end(), is_kept);
}

// Whether nobody else knows this memory.
bool is_known(c10::StorageImpl *memory, bool only_kept, const std::vector<at::Tensor> &grads,
              const std::vector<at::Tensor> &siblings) {
    Users users;
    add_users(memory, grads, &users);
    add_users(memory, siblings, &users);
    if (!only_kept && is_buffer(users.bases))
        return false;
    users.tensors.insert(users.tensors.end(), users.bases.begin(), users.bases.end());
    std::sort(users.tensors.begin(), users.tensors.end());
    const auto end = std::unique(users.tensors.begin(), users.tensors.end());
    const auto n = static_cast<size_t>(end - users.tensors.begin());
    return !OF_GUARD(sibling) || is_private(memory, n - 1);
}

// Most gradients of a call share one memory.
std::vector<size_t> known_slots(const std::vector<size_t> &slots, bool only_kept,
                                const std::vector<at::Tensor> &grads,
                                const std::vector<at::Tensor> &siblings) {
    std::vector<size_t> found;
    c10::StorageImpl *last = nullptr;
    bool last_is_known = false;
    for (size_t i = 0; i < slots.size(); i++) {
        const c10::TensorImpl *g = grads[i].unsafeGetTensorImpl();
        if (!g->has_storage())
            continue;
        if (storage_of(g) != last)
            last_is_known = is_known(last = storage_of(g), only_kept, grads, siblings);
        if (last_is_known)
            found.push_back(slots[i]);
    }
    return found;
}

// Whatever comes of them, the local parameters keep no gradient that is not consumed.
class Lent : Pinned {
  public:
    Lent(Plan &of, const std::vector<size_t> &lent) : plan(of), slots(lent) {}
    ~Lent() { take_gradients_back(plan, slots); }

  private:
    Plan &plan;
    const std::vector<size_t> &slots;
};

} // namespace

void lend_gradients(Plan &plan, const std::vector<size_t> &slots,
                    const std::vector<at::Tensor> &grads) {
    for (size_t i = 0; i < slots.size(); i++)
        plan.slots[slots[i]]->param->mutable_grad() = local_gradient(grads[i]);
}

// A gradient that has its memory for itself can be told by that.
void know_gradients(Plan &plan, const std::vector<size_t> &slots,
                    const std::vector<at::Tensor> &grads,
                    const std::vector<at::Tensor> &wrappers) {
    for (const size_t known : known_slots(slots, false, grads, {})) {
        Slot *slot = plan.slots[known];
        const c10::TensorImpl *g = slot->param->grad().unsafeGetTensorImpl();
        slot->gradient_is_known = !is_private(storage_of(g), 0);
    }
    for (size_t i = 0; i < slots.size(); i++)
        plan.slots[slots[i]]->gradient_wrapper = wrappers[i].unsafeGetTensorImpl();
}

void set_wrappers(Slot &slot, const std::vector<at::Tensor> &wrappers) {
    slot.wrappers.clear();
    for (const at::Tensor &wrapper : wrappers)
        slot.wrappers.push_back(wrapper.unsafeGetTensorImpl());
    note_versions(slot);
}

void take_gradients_back(Plan &plan, const std::vector<size_t> &slots) {
    for (const size_t slot : slots)
        if (slot < plan.slots.size())
            forget_gradient(plan.slots[slot]);
}

// All are looked at before one is updated: updates hold their gradients' memory, too.
void complete_gradients(Plan &plan, const std::vector<size_t> &slots,
                        const std::vector<at::Tensor> &grads,
                        const std::vector<at::Tensor> &siblings, bool only_kept) {
    const std::shared_ptr<Plan> keep = plan.self;
    const std::vector<size_t> ready = known_slots(slots, only_kept, grads, siblings);
    const Lent lent(plan, slots);
    lend_gradients(plan, slots, grads);
    for (const size_t slot : ready)
        plan.slots[slot]->gradient_is_known = true;
    gradients_are_complete(keep, ready, reference_to(plan.slots.front()->param));
}

void set_aliases(Slot &slot, const std::vector<at::Tensor> &candidates) {
    Impls known{slot.param};
    slot.aliases.clear();
    for (const at::Tensor &tensor : candidates) {
        const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
        if (!impl->has_storage() || storage_of(impl) != storage_of(slot.param) ||
            std::find(known.begin(), known.end(), impl) != known.end())
            continue;
        known.push_back(impl);
        slot.aliases.push_back(tensor);
    }
}

} // namespace optfuse
