// SPDX-License-Identifier: BSD-3-Clause
// lent.cpp: the gradients of DTensor parameters, as the library gets to see them.
#include "autograd/lent.h"

#include <algorithm>

#include "autograd/backward.h"
#include "autograd/consumed.h"
#include "tensor/memory.h"
#include "tensor/references.h"

namespace optfuse {
namespace {

void forget_gradient(Slot *slot) {
    slot->gradient_is_known = false;
    at::Tensor &grad = slot->param->mutable_grad();
    if (grad.defined() && !is_consumed(grad.unsafeGetTensorImpl()))
        grad.reset();
}

using Impls = std::vector<const c10::TensorImpl *>;

void keep_each_once(Impls *impls) {
    std::sort(impls->begin(), impls->end());
    impls->erase(std::unique(impls->begin(), impls->end()), impls->end());
}

void add_users(const c10::StorageImpl *memory, const std::vector<at::Tensor> &of, Impls *users) {
    const auto add = [&](const at::TensorBase &tensor) {
        const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
        if (impl->has_storage() && storage_of(impl) == memory)
            users->push_back(impl);
    };
    for (const at::Tensor &tensor : of) {
        add(tensor);
        if (tensor.is_view())
            add(tensor._base());
    }
}

// The memory is that of one collective's output: siblings are views of it, and the tensor
// that they are views of uses it, too. Nobody else may know it.
bool is_known(c10::StorageImpl *memory, const std::vector<at::Tensor> &grads,
              const std::vector<at::Tensor> &siblings) {
    Impls users;
    add_users(memory, grads, &users);
    add_users(memory, siblings, &users);
    keep_each_once(&users);
    return !OF_GUARD(sibling) || is_private(memory, users.size() - 1);
}

// Most gradients of a call share one memory.
std::vector<size_t> known_slots(const std::vector<size_t> &slots,
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
            last_is_known = is_known(last = storage_of(g), grads, siblings);
        if (last_is_known)
            found.push_back(slots[i]);
    }
    return found;
}

// Whatever comes of them, the local parameters keep no gradient that is not consumed.
class Lent {
  public:
    Lent(Plan &of, const std::vector<size_t> &lent) : plan(of), slots(lent) {}
    ~Lent() { take_gradients_back(plan, slots); }
    Lent(const Lent &) = delete;
    Lent &operator=(const Lent &) = delete;

  private:
    Plan &plan;
    const std::vector<size_t> &slots;
};

} // namespace

void lend_gradients(Plan &plan, const std::vector<size_t> &slots,
                    const std::vector<at::Tensor> &grads) {
    for (size_t i = 0; i < slots.size(); i++)
        plan.slots[slots[i]]->param->mutable_grad() = grads[i];
}

void take_gradients_back(Plan &plan, const std::vector<size_t> &slots) {
    for (const size_t slot : slots)
        if (slot < plan.slots.size())
            forget_gradient(plan.slots[slot]);
}

// All are looked at before one is updated: updates hold their gradients' memory, too.
void complete_gradients(Plan &plan, const std::vector<size_t> &slots,
                        const std::vector<at::Tensor> &grads,
                        const std::vector<at::Tensor> &siblings) {
    const std::shared_ptr<Plan> keep = plan.self;
    const std::vector<size_t> ready = known_slots(slots, grads, siblings);
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

void consume_wrapper(const at::Tensor &wrapper) {
    const at::Tensor consumed = make_consumed(wrapper);
    c10::TensorImpl *impl = wrapper.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(consumed.storage());
    mark(impl);
}

} // namespace optfuse
