// SPDX-License-Identifier: BSD-3-Clause
// expect.cpp: asks the processor for the records of several parameters, each of which has
// some twenty cache lines that nobody has used since the last update. One after the other
// each would be waited for; here those of all parameters are on their way at the same time.
#include "memory.h"
#include "tensors.h"

namespace optfuse {
namespace {

constexpr size_t kLine = 64;

void fetch(const void *record, size_t bytes) {
    for (size_t at = 0; at < bytes; at += kLine)
        __builtin_prefetch(static_cast<const char *>(record) + at, 1);
}

void fetch(const c10::TensorImpl *impl) {
    fetch(impl, sizeof *impl);
}

void fetch_storage(const c10::TensorImpl *impl) {
    fetch(storage_of(impl), sizeof(c10::StorageImpl));
}

// What an update of the slot reads beside its parameter and gradient.
template <class Visit> void each_other(const Slot *slot, Visit visit) {
    for (size_t i = 0; i < slot->plan->rule->n_state; i++)
        if (slot->state[i].defined())
            visit(slot->state[i].unsafeGetTensorImpl());
    if (slot->step.defined())
        visit(slot->step.unsafeGetTensorImpl());
}

} // namespace

// Each loop reads what the one before it has asked for.
void expect(void *, void *const *tensors, size_t n) {
    for (size_t i = 0; i < n; i++)
        fetch(tensors[i], sizeof(Slot));
    for (size_t i = 0; i < n; i++) {
        const Slot *slot = static_cast<const Slot *>(tensors[i]);
        fetch(slot->param);
        if (slot->spent.defined())
            fetch(slot->spent.unsafeGetTensorImpl());
        each_other(slot, [](const c10::TensorImpl *impl) { fetch(impl); });
    }
    for (size_t i = 0; i < n; i++) {
        const Slot *slot = static_cast<const Slot *>(tensors[i]);
        fetch_storage(slot->param);
        if (slot->param->grad().defined())
            fetch(slot->param->grad().unsafeGetTensorImpl());
        each_other(slot, fetch_storage);
    }
    for (size_t i = 0; i < n; i++) {
        const Slot *slot = static_cast<const Slot *>(tensors[i]);
        const at::Tensor &grad = slot->param->grad();
        if (grad.defined() && grad.unsafeGetTensorImpl()->has_storage())
            fetch_storage(grad.unsafeGetTensorImpl());
        if (slot->step.defined() && slot->step.unsafeGetTensorImpl()->has_storage())
            fetch(data_of(slot->step.unsafeGetTensorImpl()), sizeof(float));
    }
}

} // namespace optfuse
