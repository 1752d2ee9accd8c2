// SPDX-License-Identifier: BSD-3-Clause
// prefetch.cpp: asks the processor for the records of several parameters at the same time.
// A parameter has some thirty cache lines beside its slot, unused since its last update; without
// a prefetch the update would wait for one line after the other.
#include "host/host.h"
#include "memory/gradient.h"
#include "memory/memory.h"
#include "plan/plan.h"

namespace optfuse {
namespace {

// Wherever in its first line it begins.
template <size_t bytes> void fetch(const void *record) {
    const uintptr_t line = reinterpret_cast<uintptr_t>(record) / OF_CACHE_LINE * OF_CACHE_LINE;
#pragma GCC unroll 16
    for (size_t i = 0; i < bytes / OF_CACHE_LINE + 1; i++)
        __builtin_prefetch(reinterpret_cast<const void *>(line + i * OF_CACHE_LINE), 1);
}

void fetch_tensor(const c10::TensorImpl *impl) {
    fetch<sizeof *impl>(impl);
}

void fetch_storage(const c10::TensorImpl *impl) {
    fetch<sizeof(c10::StorageImpl)>(storage_of(impl));
}

template <class Visit> void each_other(const Slot *slot, const Visit &visit) {
    each_state(*slot, [&](const at::Tensor &tensor) { visit(tensor.unsafeGetTensorImpl()); });
}

template <class Visit> void each(void *const *tensors, size_t n, Visit visit) {
    for (size_t i = 0; i < n; i++)
        visit(static_cast<const Slot *>(tensors[i]));
}

} // namespace

// Each pass follows pointers in what the one before it has asked for. Without calls: each would cost as
// much as it asks for.
[[gnu::flatten]] void prefetch(void *, void *const *tensors, size_t n) {
    each(tensors, n, [](const Slot *slot) {
        fetch_tensor(slot->param);
        if (slot->consumed.defined())
            fetch_tensor(slot->consumed.unsafeGetTensorImpl());
        each_other(slot, fetch_tensor);
    });
    each(tensors, n, [](const Slot *slot) {
        fetch<1>(autograd_record(slot->param)); // has the gradient
        fetch_storage(slot->param);
        each_other(slot, fetch_storage);
    });
    each(tensors, n, [](const Slot *slot) {
        if (const at::Tensor &grad = gradient_of(slot->param); grad.defined())
            fetch_tensor(grad.unsafeGetTensorImpl());
        if (c10::StorageImpl *memory = storage_of(slot->step.unsafeGetTensorImpl()))
            fetch<1>(address(memory));
    });
    each(tensors, n, [](const Slot *slot) {
        if (const at::Tensor &grad = gradient_of(slot->param); grad.defined())
            fetch_storage(grad.unsafeGetTensorImpl());
    });
}

} // namespace optfuse
