// SPDX-License-Identifier: BSD-3-Clause
#include "memory/absent.h"

#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <stdexcept>

namespace optfuse {

const c10::DeleterFnPtr cpu_deleter = c10::GetAllocator(c10::kCPU)->raw_deleter();
std::atomic<int> marks_wanted{0};

std::vector<const Absent *> &absent_kinds = *new std::vector<const Absent *>;

const Absent *absent_by(c10::DeleterFnPtr deleter) {
    for (const Absent *kind : absent_kinds)
        if (kind->deleter == deleter && deleter != nullptr)
            return kind;
    return nullptr;
}

bool make_memory(c10::StorageImpl *storage) {
    const Absent *kind = absent_of(storage);
    return kind == nullptr || kind->make == nullptr || kind->make(storage);
}

void compute_now(const c10::TensorImpl *gradient) {
    if (gradient->has_storage() &&
        !make_memory(gradient->unsafe_storage().unsafeGetStorageImpl()))
        throw std::runtime_error(of_error_message());
}

bool makes_another(const char *op) {
    const size_t length = std::strlen(op);
    return std::strncmp(op, "aten::new_", 10) == 0 ||
           (length > 5 && std::strcmp(op + length - 5, "_like") == 0);
}

} // namespace optfuse
