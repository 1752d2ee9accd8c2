// SPDX-License-Identifier: BSD-3-Clause
// memory.h: the raw memory of tensors, past the seal, and whether others share it. The seal says that
// a storage's numbers are absent or late (absent.h). Whoever reads numbers past the dispatcher takes
// const_data_ptr(), which raises then; only what belongs to an update or a scaling reads past the
// seal, once the core has settled what came before.
#pragma once

#include <c10/core/Allocator.h>

#include "base/compat.h"
#include "base/device.h"
#include "memory/absent.h"

namespace optfuse {

inline c10::StorageImpl *storage_of(const c10::TensorImpl *impl) {
    return impl->unsafe_storage().unsafeGetStorageImpl();
}

// Inlined: every update asks for each of its tensors, and the call alone would double that.
[[gnu::always_inline]] inline void *data_of(const c10::TensorImpl *impl) {
    return static_cast<char *>(address(storage_of(impl))) +
           impl->dtype().itemsize() * static_cast<size_t>(impl->storage_offset());
}

// Sizes or strides. They are a few numbers each, and every update compares some; a call of memcmp()
// takes longer.
inline bool equal(c10::IntArrayRef a, c10::IntArrayRef b) {
    bool same = a.size() == b.size();
    for (size_t i = 0; same && i < a.size(); i++)
        same = a[i] == b[i];
    return same;
}

// Allocated by PyTorch for one process alone, or to be.
inline bool is_own(const c10::DataPtr &data) {
    if (!data.device().is_cpu())
        return is_gpu_deleter(data.get_deleter(), data.device());
    const Absent *kind = absent_by(data.get_deleter());
    return kind != nullptr && kind->make != nullptr;
}

// The same for most memory, without a call.
[[gnu::always_inline]] inline bool is_own(const c10::StorageImpl *storage) {
    const c10::DataPtr &data = data_ptr_of(storage);
    return data.get_deleter() == cpu_deleter || is_own(data);
}

// The number of the update that comes after a step counter's, in its own precision, as stock counts.
[[gnu::always_inline]] inline double number_after(const c10::TensorImpl *counter) {
    const void *memory = address(storage_of(counter));
    const int64_t at = counter->storage_offset();
    return counter->dtype().toScalarType() == c10::ScalarType::Double
               ? static_cast<const double *>(memory)[at] + 1
               : static_cast<double>(static_cast<const float *>(memory)[at] + 1.0f);
}

// Only one tensor and `held` references of ours know this storage.
[[gnu::always_inline]] inline bool is_private(c10::StorageImpl *storage, size_t held) {
    const size_t users = c10::raw::intrusive_ptr::use_count(storage);
    const bool exclusive =
        users <= 1 + held || (users == 2 + held && idle_references(*storage) == 1);
    return exclusive && is_own(storage);
}

// Whether one owner, such as a parameter whose .grad it is, and Python's wrapper hold the tensor.
[[gnu::always_inline]] inline bool is_held_once(const c10::TensorImpl *impl) {
    auto *counted = const_cast<c10::TensorImpl *>(impl);
    const size_t owners = c10::raw::intrusive_ptr::use_count(counted);
    return owners <= 1 || owners <= 1 + python_references(*impl);
}

} // namespace optfuse
