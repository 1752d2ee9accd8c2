// SPDX-License-Identifier: BSD-3-Clause
// scale.cpp: gradients that are multiplied by clipping or unscaling when they
// are next read, and not before.
#include "compat.h"
#include "guard.h"
#include "memory.h"
#include "tensors.h"

namespace optfuse {
namespace {

// What a kernel can multiply in place, without autograd having to know.
bool can_scale(const at::Tensor &grad, of_dtype *dtype) {
    if (!grad.defined())
        return false;
    c10::TensorImpl *g = grad.unsafeGetTensorImpl();
    return g->layout() == c10::kStrided && g->has_storage() && g->device().is_cpu() &&
           !g->key_set().has(c10::DispatchKey::Python) && dtype_of(g, dtype) && !is_lazy(g) &&
           !is_spent(g) && g->is_non_overlapping_and_dense() && !g->requires_grad() &&
           !g->is_inference() && g->numel() != 0;
}

} // namespace

of_found collect_gradient(void *, void *tensor, of_inputs *in) {
    Slot *slot = static_cast<Slot *>(tensor);
    const at::Tensor &grad = slot->param->grad();
    if (!can_scale(grad, &in->dtype))
        return OF_FOUND_NOTHING;
    c10::TensorImpl *g = grad.unsafeGetTensorImpl();
    c10::StorageImpl *storage = storage_of(g);
    if (has_mark(g))
        of_launch_at(storage, false);
    Hold *hold = new (in->hold) Hold;
    hold->slot = slot;
    hold->scaling = true;
    hold->tensors[0] = g;
    hold->storages[0] = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
    in->keys[0] = storage;
    in->n_keys = hold->n = 1;
    in->param = data_of(g);
    in->numel = g->numel();
    in->device = OF_CPU;
    return OF_FOUND_INPUTS;
}

// From here to its end the gradient may be freed at any time.
bool defer_scaling(Hold *hold) {
    c10::StorageImpl *storage = hold->storages[0].get();
    if (OF_GUARD(privacy) && !is_private(storage, 1))
        return false;
    if (OF_GUARD(key))
        mark(hold->tensors[0]);
    if (OF_GUARD(seal))
        seal(storage);
    hold->gradient = c10::weak_intrusive_ptr<c10::StorageImpl>(hold->storages[0]);
    hold->storages[0].reset();
    return true;
}

bool is_alive(void *, void *opaque) {
    return !static_cast<Hold *>(opaque)->gradient.expired();
}

bool keep(void *, void *opaque) {
    Hold *hold = static_cast<Hold *>(opaque);
    hold->storages[0] = hold->gradient.lock();
    return static_cast<bool>(hold->storages[0]);
}

void settle_scaling(Hold *hold, bool was_deferred) {
    if (was_deferred && hold->storages[0])
        unseal(hold->storages[0].get());
}

// What can't be left pending is multiplied as PyTorch does.
void scale_one(const GradientOf &of, double number, float norm, const at::Tensor &factor) {
    bool scaled = false;
    if (of_plan_scale(of.plan->core, of.slot->index, number, norm, &scaled) != OF_OK)
        throw Error(std::string("optfuse: ") + of_error_message());
    if (scaled)
        of.grad().unsafeGetTensorImpl()->bump_version();
    else if (of.grad().defined())
        of.grad().mul_(factor);
}

} // namespace optfuse
