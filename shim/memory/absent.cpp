// SPDX-License-Identifier: BSD-3-Clause
#include "memory/absent.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>
#include <stdexcept>
#include <utility>

#include "base/device.h"

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

at::Tensor make_absent(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                       c10::Device device, void *context, c10::DeleterFnPtr deleter) {
    const bool is_plain = strides.empty();
    const size_t element = c10::elementSize(dtype);
    const size_t bytes =
        is_plain ? static_cast<size_t>(c10::multiply_integers(sizes)) * element
                 : at::detail::computeStorageNbytes(sizes, strides, element);
    auto storage = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(nullptr, context, deleter, device),
        device.is_cpu() ? c10::GetAllocator(c10::kCPU) : gpu_allocator(device), true);
    seal(storage.get());
    const c10::DispatchKeySet keys(c10::computeDispatchKey(dtype, c10::kStrided, device));
    at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(std::move(storage)), keys, c10::scalarTypeToTypeMeta(dtype));
    if (is_plain)
        made.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
    else
        made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    mark(made.unsafeGetTensorImpl());
    return made;
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
