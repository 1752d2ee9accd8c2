// SPDX-License-Identifier: BSD-3-Clause
// spent.cpp: what .grad holds in backward mode once the update has consumed
// it. Metadata (shape, dtype, device) reads as usual; any operator that would
// read numbers raises, because no numbers are left.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zero.h>
#include <c10/core/TensorOptions.h>

#include <cstring>
#include <mutex>
#include <unordered_map>

#include "compat.h"
#include "error.h"
#include "tensors.h"

namespace optfuse {
namespace {

// A spent gradient is known by its storage's deleter.
void nothing_to_free(void *) {}

// The spent gradients of a device share an empty storage, which is sealed: an access past the
// dispatcher raises. While a profiler notes the addresses of tensors, it may have theirs.
struct SpentStorages {
    std::mutex lock; // guards the rest
    std::unordered_map<c10::Device, c10::Storage> of;
    bool sealed = true;
};

SpentStorages &spent_storages() {
    static auto *storages = new SpentStorages; // leaked: tensors may outlive destructors
    return *storages;
}

const c10::Storage &spent_storage(const c10::Device &device) {
    SpentStorages &storages = spent_storages();
    const std::lock_guard<std::mutex> guard(storages.lock);
    c10::Storage &storage = storages.of[device];
    if (!storage) {
        storage = c10::Storage(c10::Storage::use_byte_size_t(), 0,
                               c10::DataPtr(nullptr, nullptr, nothing_to_free, device));
        set_seal(storage.unsafeGetStorageImpl(), storages.sealed);
    }
    return storage;
}

bool is_zeroing(const char *op) {
    return std::strcmp(op, "aten::zero_") == 0 || std::strcmp(op, "aten::_foreach_zero_") == 0;
}

bool reads_no_numbers(const char *op) {
    return std::strcmp(op, "aten::detach_") == 0 || std::strcmp(op, "aten::requires_grad_") == 0 ||
           std::strcmp(op, "optfuse::launch") == 0;
}

// As Python writes it: (), (3,), (3, 4).
std::string shape_of(const c10::TensorImpl *impl) {
    std::string shape;
    for (const auto size : impl->sizes())
        shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    return "(" + shape + (impl->dim() == 1 ? ",)" : ")");
}

// zero_grad(set_to_none=False): the gradient becomes a real tensor again.
void make_real_zeros(c10::TensorImpl *impl) {
    const auto sizes = impl->sizes().vec();
    const auto strides = impl->strides().vec();
    PlainMode plain;
    const at::Tensor zeros =
        at::empty_strided(sizes, strides,
                          at::TensorOptions().dtype(impl->dtype()).device(impl->device()))
            .zero_();
    impl->set_storage_keep_dtype(zeros.storage());
    impl->set_sizes_and_strides(zeros.sizes(), zeros.strides());
    unmark(impl);
}

} // namespace

at::Tensor make_spent(const at::Tensor &param) {
    auto spent = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(spent_storage(param.device())),
        c10::DispatchKeySet(c10::computeDispatchKey(param.scalar_type(), c10::kStrided,
                                                    param.device())),
        param.dtype());
    // As autograd lays gradients out.
    if (param.is_non_overlapping_and_dense())
        spent.unsafeGetTensorImpl()->set_sizes_and_strides(param.sizes(), param.strides());
    else
        spent.unsafeGetTensorImpl()->set_sizes_contiguous(param.sizes());
    mark(spent.unsafeGetTensorImpl());
    return spent;
}

void seal_spent(bool sealed) {
    SpentStorages &storages = spent_storages();
    const std::lock_guard<std::mutex> guard(storages.lock);
    storages.sealed = sealed;
    for (const auto &[device, storage] : storages.of)
        set_seal(storage.unsafeGetStorageImpl(), sealed);
}

bool is_spent(const c10::TensorImpl *impl) {
    return impl->has_storage() && impl->unsafe_storage()
                                          .unsafeGetStorageImpl()
                                          ->_mutable_data_ptr_no_checks()
                                          .get_deleter() == nothing_to_free;
}

void answer_spent(const char *op, c10::TensorImpl *impl) {
    if (is_zeroing(op)) {
        make_real_zeros(impl);
        return;
    }
    if (reads_no_numbers(op))
        return;
    const bool raw = std::strcmp(op, "optfuse::touch") == 0;
    throw Error(std::string("optfuse: ") +
                (raw ? "an access to raw memory (such as data_ptr)" : op) +
                " read the gradient of a parameter of shape " + shape_of(impl) +
                ", but backward fusion has already applied it and freed it. Call zero_grad() "
                "before the next backward and before the model is moved, cast or copied. "
                "For gradient accumulation mark the passes that only add with "
                "optfuse.accumulate(optimizer). Clipping, loss scaling and anything else that "
                "needs gradients after backward work with optfuse.fuse(optimizer, mode=\"forward\").");
}

} // namespace optfuse
