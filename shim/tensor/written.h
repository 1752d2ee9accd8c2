// SPDX-License-Identifier: BSD-3-Clause
// written.h: the raw memory of tensors that are written.
#pragma once

#include "guard.h"
#include "tensor/memory.h"

namespace optfuse {

// The memory of a tensor that is about to be written past the dispatcher. Memory that copies on
// write (torch._lazy_clone) is copied now.
[[gnu::always_inline]] inline void *written_data_of(const c10::TensorImpl *impl) {
    c10::StorageImpl *storage = storage_of(impl);
    if (!is_own(storage) && OF_GUARD(copy_on_write))
        storage->mutable_data();
    return data_of(impl);
}

} // namespace optfuse
