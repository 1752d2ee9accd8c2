// SPDX-License-Identifier: BSD-3-Clause
// consumed.cpp: what .grad holds in backward mode once the update has consumed
// it. Metadata (shape, dtype, device) reads as usual; any operator that would
// read numbers raises, because no numbers are left.
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zero.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstring>
#include <mutex>
#include <unordered_map>

#include "autograd/consumed.h"
#include "compat.h"
#include "error.h"
#include "tensor/memory.h"
#include "tensor/plain_mode.h"

namespace optfuse {
namespace {

// A consumed gradient is known by its storage's deleter.
void nothing_to_free(void *) {}

// What a DTensor that reads as one has in the place of its storage.
struct Wrapped {
    at::Tensor local;    // its local tensor, which is consumed, too
    c10::Storage before; // its own
};

void free_wrapped(void *wrapped) { delete static_cast<Wrapped *>(wrapped); }

c10::DataPtr &memory_of(const c10::TensorImpl *impl) {
    return storage_of(impl)->_mutable_data_ptr_no_checks();
}

// The consumed gradients of a device share an empty storage, which is sealed: an access past the
// dispatcher raises. While a profiler notes the addresses of tensors, it may have theirs.
struct ConsumedStorages {
    std::mutex lock; // guards the rest
    std::unordered_map<c10::Device, c10::Storage> of;
    bool sealed = true;
};

ConsumedStorages &consumed_storages() {
    static auto *storages = new ConsumedStorages; // leaked: tensors may outlive destructors
    return *storages;
}

const c10::Storage &consumed_storage(const c10::Device &device) {
    ConsumedStorages &storages = consumed_storages();
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
           std::strcmp(op, "optfuse::launch") == 0 ||
           std::strcmp(op, "optfuse::consume_wrapper") == 0 ||
           std::strcmp(op, "optfuse::are_consumed") == 0 ||
           std::strcmp(op, "optfuse::complete") == 0; // knows which are
}

// What Module.to() and the like ask of each gradient; aten::to() gives the same tensor, or
// goes on to aten::_to_copy.
bool moves(const char *op) {
    return std::strcmp(op, "aten::to") == 0 ||
           std::strcmp(op, "aten::_has_compatible_shallow_copy_type") == 0;
}

bool converts(const char *op) { return std::strcmp(op, "aten::_to_copy") == 0; }

c10::Device with_index(const c10::Device &device) {
    if (device.has_index() || device.is_cpu() || device.is_meta())
        return device;
    return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

// As Python writes it: (), (3,), (3, 4).
std::string shape_of(const c10::TensorImpl *impl) {
    std::string shape;
    for (const auto size : impl->sizes())
        shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    return "(" + shape + (impl->dim() == 1 ? ",)" : ")");
}

void make_zeros(c10::TensorImpl *impl) {
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

// zero_grad(set_to_none=False): the gradient becomes a real tensor again.
void make_real_zeros(c10::TensorImpl *impl) {
    if (memory_of(impl).get_deleter() != free_wrapped) {
        make_zeros(impl);
        return;
    }
    const auto *wrapped = static_cast<Wrapped *>(memory_of(impl).get_context());
    if (is_consumed(wrapped->local.unsafeGetTensorImpl()))
        make_zeros(wrapped->local.unsafeGetTensorImpl());
    const c10::Storage before = wrapped->before;
    impl->set_storage_keep_dtype(before);
    unmark(impl);
}

at::Tensor without_shape(const c10::Device &device, at::ScalarType dtype) {
    return at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(consumed_storage(device)),
        c10::DispatchKeySet(c10::computeDispatchKey(dtype, c10::kStrided, device)),
        c10::scalarTypeToTypeMeta(dtype));
}

} // namespace

at::Tensor make_consumed(const at::Tensor &param) {
    at::Tensor consumed = without_shape(param.device(), param.scalar_type());
    // As autograd lays gradients out.
    if (param.is_non_overlapping_and_dense())
        consumed.unsafeGetTensorImpl()->set_sizes_and_strides(param.sizes(), param.strides());
    else
        consumed.unsafeGetTensorImpl()->set_sizes_contiguous(param.sizes());
    mark(consumed.unsafeGetTensorImpl());
    return consumed;
}

void convert_consumed(torch::jit::Stack *stack) {
    enum { SELF, DTYPE, LAYOUT, DEVICE, PIN_MEMORY, NON_BLOCKING, MEMORY_FORMAT, N };
    const auto argument = [stack](size_t i) -> const c10::IValue & {
        return torch::jit::peek(*stack, i, N);
    };
    const at::Tensor self = argument(SELF).toTensor();
    const auto dtype = argument(DTYPE).toOptional<at::ScalarType>().value_or(self.scalar_type());
    const auto device = argument(DEVICE).toOptional<c10::Device>().value_or(self.device());
    const auto format =
        argument(MEMORY_FORMAT).toOptional<at::MemoryFormat>().value_or(at::MemoryFormat::Preserve);
    at::Tensor consumed = without_shape(with_index(device), dtype);
    c10::TensorImpl *impl = consumed.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(self.sizes(), self.strides());
    if (format != at::MemoryFormat::Preserve)
        impl->empty_tensor_restride(format);
    mark(impl);
    torch::jit::drop(*stack, N);
    stack->push_back(std::move(consumed));
}

void seal_consumed(bool sealed) {
    ConsumedStorages &storages = consumed_storages();
    const std::lock_guard<std::mutex> guard(storages.lock);
    storages.sealed = sealed;
    for (const auto &[device, storage] : storages.of)
        set_seal(storage.unsafeGetStorageImpl(), sealed);
}

bool is_consumed(const c10::TensorImpl *impl) {
    if (!impl->has_storage())
        return false;
    const c10::DeleterFnPtr deleter = memory_of(impl).get_deleter();
    return deleter == nothing_to_free || deleter == free_wrapped;
}

void consume_wrapper(const at::Tensor &wrapper, const at::Tensor &local) {
    c10::TensorImpl *impl = wrapper.unsafeGetTensorImpl();
    auto *wrapped = new Wrapped{local, impl->unsafe_storage()};
    impl->set_storage_keep_dtype(
        c10::Storage(c10::Storage::use_byte_size_t(), 0,
                     c10::DataPtr(nullptr, wrapped, free_wrapped, wrapper.device())));
    mark(impl);
}

bool answer_consumed(const char *op, c10::TensorImpl *impl) {
    if (is_zeroing(op)) {
        make_real_zeros(impl);
        return false;
    }
    if (reads_no_numbers(op) || moves(op))
        return false;
    if (converts(op) && !impl->key_set().has(c10::DispatchKey::Python))
        return true;
    const bool raw = std::strcmp(op, "optfuse::access") == 0;
    fail(std::string("optfuse: ") +
         (raw ? "an access to raw memory (such as data_ptr)" : op) +
         " read the gradient of a parameter of shape " + shape_of(impl) +
         ", but backward fusion has already applied it and freed it. Call step() and "
         "zero_grad() before the next backward that reaches this parameter. Backward "
         "passes that only add to the gradients, or whose gradients for this optimizer are "
         "thrown away (as those of a GAN's generator loss for the discriminator), belong "
         "inside `with optfuse.accumulate(optimizer):`. Clipping, loss scaling and anything "
         "else that needs gradients after backward work with optfuse.fuse(optimizer, "
         "mode=\"forward\").");
}

} // namespace optfuse
