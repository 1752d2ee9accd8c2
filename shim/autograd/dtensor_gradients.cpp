// SPDX-License-Identifier: BSD-3-Clause
// dtensor_gradients.cpp: the gradients of DTensor parameters, as the library gets to see them.
#include "autograd/dtensor_gradients.h"

#include <algorithm>
#include <tuple>

#include "absent/consumed.h"
#include "autograd/backward.h"
#include "guard.h"
#include "memory/gradient.h"
#include "memory/memory.h"
#include "memory/proxies.h"
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

// Tensors over one memory: a collective's output, and views of it.
struct User {
    const c10::StorageImpl *memory;
    const c10::TensorImpl *tensor, *base; // that it is a view of; or null
    bool operator<(const User &other) const {
        return std::tie(memory, tensor) < std::tie(other.memory, other.tensor);
    }
    bool operator==(const User &other) const { return tensor == other.tensor; }
};

void add_users(const std::vector<at::Tensor> &of, std::vector<User> *users) {
    for (const at::Tensor &tensor : of) {
        const c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
        if (!impl->has_storage())
            continue;
        const c10::TensorImpl *base =
            tensor.is_view() ? tensor._base().unsafeGetTensorImpl() : nullptr;
        const bool is_over_it = base != nullptr && base->has_storage() &&
                                storage_of(base) == storage_of(impl);
        users->push_back({storage_of(impl), impl, is_over_it ? base : nullptr});
    }
}

using Users = std::vector<User>::const_iterator;
using Impls = std::vector<const c10::TensorImpl *>;

// Somebody has the collective's output itself, as a buffer that is used again. bases: one of each view.
bool is_buffer(const Impls &bases) {
    const auto is_kept = [&bases](const c10::TensorImpl *base) {
        const size_t views = static_cast<size_t>(std::count(bases.begin(), bases.end(), base));
        const size_t held = c10::raw::intrusive_ptr::use_count(const_cast<c10::TensorImpl *>(base));
        return held > views + idle_references(*base);
    };
    return OF_GUARD(base) && std::any_of(bases.begin(), bases.end(), is_kept);
}

// Whether nobody else knows the memory of these, which is one. room: for two lists.
bool is_known(Users begin, Users end, bool only_kept, Impls *room) {
    Impls &tensors = room[0], &bases = room[1];
    tensors.clear();
    bases.clear();
    for (; begin != end; ++begin) {
        tensors.push_back(begin->tensor);
        if (begin->base != nullptr)
            bases.push_back(begin->base);
    }
    if (!only_kept && is_buffer(bases))
        return false;
    tensors.insert(tensors.end(), bases.begin(), bases.end());
    std::sort(tensors.begin(), tensors.end());
    const auto n = std::unique(tensors.begin(), tensors.end()) - tensors.begin();
    return !OF_GUARD(sibling) || is_private(storage_of(tensors[0]), static_cast<size_t>(n) - 1);
}

// Most gradients of a call share one memory with their neighbours.
std::vector<size_t> known_slots(const std::vector<size_t> &slots, bool only_kept,
                                const std::vector<at::Tensor> &grads,
                                const std::vector<at::Tensor> &siblings) {
    std::vector<User> users;
    add_users(grads, &users);
    add_users(siblings, &users);
    std::sort(users.begin(), users.end());
    users.erase(std::unique(users.begin(), users.end()), users.end());
    std::vector<size_t> found;
    Impls room[2];
    const c10::StorageImpl *last = nullptr;
    bool last_is_known = false;
    for (size_t i = 0; i < slots.size(); i++) {
        const c10::TensorImpl *g = grads[i].unsafeGetTensorImpl();
        if (!g->has_storage())
            continue;
        if (storage_of(g) != last) {
            last = storage_of(g);
            const auto [begin, end] = std::equal_range(
                users.cbegin(), users.cend(), User{last, nullptr, nullptr},
                [](const User &a, const User &b) { return a.memory < b.memory; });
            last_is_known = is_known(begin, end, only_kept, room);
        }
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
        plan.slots[slots[i]]->param->mutable_grad() = grads[i];
}

// A gradient that has its memory for itself can be told by that.
void know_gradients(Plan &plan, const std::vector<size_t> &slots,
                    const std::vector<at::Tensor> &grads) {
    for (const size_t known : known_slots(slots, false, grads, {})) {
        Slot *slot = plan.slots[known];
        const c10::TensorImpl *g = slot->param->grad().unsafeGetTensorImpl();
        slot->gradient_is_known = !is_private(storage_of(g), 0);
    }
    for (const size_t lent : slots)
        plan.slots[lent]->gradient_wrapper =
            gradient_of(plan.slots[lent]->wrappers[0]).unsafeGetTensorImpl();
}

void set_wrappers(Slot &slot, const std::vector<at::Tensor> &wrappers) {
    remove_proxies(slot.wrapped, Proxies(slot.wrappers.begin(), slot.wrappers.end()));
    slot.wrapped = nullptr;
    slot.wrappers.clear();
    for (const at::Tensor &wrapper : wrappers)
        slot.wrappers.push_back(wrapper.unsafeGetTensorImpl());
    slot.plan->reduces = true; // the loader has gradients wait
    note_versions(slot);
}

void take_gradient_back(Slot &slot, bool stepped) {
    at::Tensor &grad = slot.param->mutable_grad();
    if (stepped && grad.defined() && !is_consumed(grad.unsafeGetTensorImpl()) &&
        OF_GUARD(wrapper_version))
        slot.wrappers[0]->bump_version();
    forget_gradient(&slot);
    grad.reset(); // nobody else may hold a consumed one
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

namespace {

// Whether nobody else has the one before.
bool can_reuse_wrapper(const at::Tensor &wrapper) {
    return wrapper.defined() && is_consumed(wrapper.unsafeGetTensorImpl()) &&
           wrapper.use_count() == 1 + idle_references(*wrapper.unsafeGetTensorImpl());
}

} // namespace

bool consume(Slot &slot) {
    if (!can_reuse_wrapper(slot.consumed_wrapper))
        return false;
    consume_by(slot, slot.consumed_wrapper);
    return true;
}

void consume_by(Slot &slot, const at::Tensor &wrapper) {
    slot.consumed_wrapper = wrapper;
    slot.wrappers[0]->mutable_grad() = wrapper;
    slot.used = consume_again(local_gradient(wrapper).unsafeGetTensorImpl());
    slot.wrappers[0]->bump_version();
    note_versions(slot);
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
