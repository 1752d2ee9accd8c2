// SPDX-License-Identifier: BSD-3-Clause
// written.h: the raw memory of tensors that are written.
#pragma once

#include "guard.h"
#include "memory/memory.h"

namespace optfuse {

// Memory that is about to be written past the dispatcher. Memory that copies on write
// (torch._lazy_clone) is copied now.
[[gnu::always_inline]] inline void *written_memory(c10::StorageImpl *storage) {
    if (!is_own(storage) && OF_GUARD(copy_on_write))
        storage->mutable_data();
    return address(storage);
}

// That of a tensor.
[[gnu::always_inline]] inline void *written_data_of(const c10::TensorImpl *impl) {
    written_memory(storage_of(impl));
    return data_of(impl);
}

} // namespace optfuse
