// SPDX-License-Identifier: BSD-3-Clause
#include "aliases.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

namespace fake {
namespace {

const void *address(const c10::Storage &storage) {
    return storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
}

void keep(void *) {} // the memory is somebody else's

at::Tensor over(c10::Storage storage, c10::DispatchKey key, const at::Tensor &like) {
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(key), like.dtype());
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    if (like.unsafeGetTensorImpl()->is_wrapped_number())
        impl->set_wrapped_number(true);
    return tensor;
}

at::Tensor view(const at::Tensor &base, const at::Tensor &like) {
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                        like.storage_offset());
    return tensor;
}

bool same_shape(const at::Tensor &a, const at::Tensor &b) {
    return a.sizes() == b.sizes() && a.strides() == b.strides() &&
           a.storage_offset() == b.storage_offset();
}

// The operator made the CPU's storage larger, which moved it.
void grow(const c10::Storage &mine, const c10::Storage &cpu) {
    if (address(cpu) == address(mine) && cpu.nbytes() == mine.nbytes())
        return;
    c10::DataPtr memory = allocator()->allocate(cpu.nbytes());
    if (cpu.nbytes() != 0)
        std::memcpy(memory.get(), address(cpu), cpu.nbytes());
    mine.set_data_ptr_noswap(std::move(memory));
    mine.set_nbytes(cpu.nbytes());
}

} // namespace

bool is_mine(const at::Tensor &tensor) {
    return tensor.defined() && tensor.device().type() == kDevice;
}

at::Tensor borrowed(const at::Tensor &tensor) {
    void *memory = const_cast<void *>(address(tensor.storage()));
    c10::Storage same(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                      c10::DataPtr(memory, memory, &keep, tensor.device()), allocator(), true);
    const at::Tensor made = over(std::move(same), c10::DispatchKey::PrivateUse1, tensor);
    made._set_neg(tensor.is_neg());
    made._set_conj(tensor.is_conj());
    return made;
}

Range range_of(const at::Tensor &tensor, bool write) {
    if (tensor.numel() == 0)
        return {nullptr, 0, write};
    int64_t last = 0; // strides are not negative
    for (int64_t i = 0; i < tensor.dim(); i++)
        last += (tensor.size(i) - 1) * tensor.stride(i);
    const char *base = static_cast<const char *>(address(tensor.storage()));
    const size_t size = tensor.element_size();
    return {base + static_cast<size_t>(tensor.storage_offset()) * size,
            (static_cast<size_t>(last) + 1) * size, write};
}

Range arrived(const at::Tensor &tensor, bool write, c10::DeviceIndex device) {
    const Range range = range_of(tensor, write);
    arrive(current_stream(device), range);
    return range;
}

c10::Storage Aliases::alias_of(const c10::Storage &storage, Use use) {
    if (use == Use::read)
        (void)storage.data(); // raises where a kernel of a real device would
    if (use == Use::write)
        (void)storage.mutable_data();
    for (const auto &[mine, cpu] : storages_)
        if (mine.is_alias_of(storage))
            return cpu;
    void *memory = const_cast<void *>(address(storage));
    c10::Storage cpu(c10::Storage::use_byte_size_t(), storage.nbytes(),
                     c10::DataPtr(memory, memory, &keep, c10::kCPU), c10::GetCPUAllocator(), true);
    storages_.emplace_back(storage, cpu);
    return cpu;
}

at::Tensor Aliases::of(const at::Tensor &tensor, Use use) {
    if (!is_mine(tensor))
        return tensor;
    TORCH_CHECK(device == -1 || device == tensor.get_device() || tensor.dim() == 0,
                "tensors are on different devices");
    if (device == -1 || tensor.dim() != 0)
        device = static_cast<c10::DeviceIndex>(tensor.get_device());
    if (use != Use::none)
        arrived(tensor, use == Use::write, static_cast<c10::DeviceIndex>(tensor.get_device()));
    const at::Tensor cpu = over(alias_of(tensor.storage(), use), c10::DispatchKey::CPU, tensor);
    cpu._set_neg(tensor.is_neg());
    cpu._set_conj(tensor.is_conj());
    pairs_.push_back({tensor, cpu, use});
    return cpu;
}

c10::Storage *Aliases::device_storage(const c10::Storage &cpu) {
    for (auto &[mine, alias] : storages_)
        if (alias.is_alias_of(cpu))
            return &mine;
    return nullptr;
}

at::Tensor Aliases::move(const at::Tensor &cpu) {
    const c10::DeviceGuard guard({kDevice, device});
    c10::Storage storage(c10::Storage::use_byte_size_t(), cpu.storage().nbytes(),
                         allocator()->allocate(cpu.storage().nbytes()), allocator(), true);
    if (cpu.storage().nbytes() != 0)
        std::memcpy(storage.mutable_data(), cpu.storage().data(), cpu.storage().nbytes());
    const at::Tensor mine = over(std::move(storage), c10::DispatchKey::PrivateUse1, cpu);
    made_.push_back(mine);
    return mine;
}

at::Tensor Aliases::back(const at::Tensor &result) {
    if (!result.defined() || is_mine(result))
        return result;
    for (const Pair &pair : pairs_)
        if (pair.cpu.is_same(result))
            return pair.mine;
    for (const Pair &pair : pairs_)
        if (pair.cpu.storage().is_alias_of(result.storage()))
            return view(pair.mine, result);
    return move(result);
}

void Aliases::settle() {
    const c10::OptionalDeviceGuard guard(
        device == -1 ? c10::nullopt : std::optional<c10::Device>({kDevice, device}));
    for (const auto &[mine, cpu] : storages_)
        grow(mine, cpu);
    for (const Pair &pair : pairs_) {
        c10::TensorImpl *impl = pair.mine.unsafeGetTensorImpl();
        c10::Storage *storage = device_storage(pair.cpu.storage());
        if (storage != nullptr && !storage->is_alias_of(pair.mine.storage()))
            impl->set_storage_keep_dtype(*storage);
        if (!same_shape(pair.mine, pair.cpu))
            impl->set_sizes_and_strides(pair.cpu.sizes(), pair.cpu.strides(),
                                        pair.cpu.storage_offset());
    }
}

void Aliases::report(const std::string &name) const {
    std::vector<Range> ranges;
    for (const Pair &pair : pairs_)
        if (pair.use != Use::none)
            ranges.push_back(range_of(pair.mine, pair.use == Use::write));
    for (const at::Tensor &tensor : made_)
        ranges.push_back(range_of(tensor, true));
    if (!ranges.empty())
        launch(current_stream(device), name, ranges);
}

} // namespace fake
