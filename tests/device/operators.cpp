// SPDX-License-Identifier: BSD-3-Clause
// operators.cpp: what the fallback can't do: making tensors, copies between
// devices, numbers for the host, convolutions.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "aliases.h"
#include "graphs.h"

namespace fake {
namespace {

using Sizes = c10::SymIntArrayRef;

c10::Device chosen(std::optional<c10::Device> device) {
    return device && device->has_index() ? *device : c10::Device(kDevice, current_device());
}

at::Tensor empty(Sizes sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
    const c10::DeviceGuard guard(chosen(device));
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), allocator(),
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(Sizes sizes, Sizes strides, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device,
                         std::optional<bool>) {
    const c10::DeviceGuard guard(chosen(device));
    return at::detail::empty_strided_generic(
        C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), allocator(),
        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// Between devices both streams wait for each other, as PyTorch has it on CUDA.
void copy_across(const at::Tensor &from, const at::Tensor &to) {
    const auto a = static_cast<c10::DeviceIndex>(from.get_device());
    const auto b = static_cast<c10::DeviceIndex>(to.get_device());
    wait_for(current_stream(a), current_stream(b));
    // The machine has no name for a copy that two devices take part in.
    launch(current_stream(a), "aten::copy_", {range_of(from, false)});
    wait_for(current_stream(b), current_stream(a));
    launch(current_stream(b), "aten::copy_", {range_of(to, true)});
}

bool same_order(const at::Tensor &a, const at::Tensor &b) {
    return a.dtype() == b.dtype() && a.sizes() == b.sizes() && a.strides() == b.strides();
}

// As CUDA has it: what is made to another dtype or order before it goes down is made so on the
// device first, and what goes up on the host, at once. False: nothing was done.
bool copied_late(const at::Tensor &from, const at::Tensor &to) {
    const bool down = is_mine(from);
    const at::Tensor &mine = down ? from : to, &host = down ? to : from;
    const StreamNumber stream =
        current_stream(static_cast<c10::DeviceIndex>(mine.get_device()));
    if (is_mine(host) || capture_of(stream) != 0 || !is_pinned(range_of(host, false).address) ||
        !to.is_non_overlapping_and_dense() || from.is_neg() != to.is_neg() ||
        from.is_conj() != to.is_conj() || !(down || same_order(from, to)))
        return false;
    const at::Tensor source =
        same_order(from, to) ? from : at::empty_like(to, mine.options().dtype(to.dtype())).copy_(from);
    const Range read = range_of(source, false), write = range_of(to, true);
    copy_late(stream, "aten::copy_", const_cast<void *>(write.address), read.address, read.bytes);
    return true;
}

at::Tensor copy_from(const at::Tensor &from, const at::Tensor &to, bool non_blocking) {
    if (non_blocking && copied_late(from, to))
        return to;
    for (const auto &[host, mine] : {std::pair(from, to), std::pair(to, from)})
        if (!is_mine(host)) // it may be pinned
            arrived(host, host.is_same(to), static_cast<c10::DeviceIndex>(mine.get_device()));
    Aliases source, target;
    target.of(to, Use::write).copy_(source.of(from, Use::read), non_blocking);
    if (source.device != -1 && target.device != -1 && source.device != target.device)
        copy_across(from, to);
    else if (target.device == -1) {
        source.report("aten::copy_");
        synchronize(current_stream(source.device)); // the host's memory is not pinned
    } else {
        Aliases both;
        both.of(from, Use::read);
        both.of(to, Use::write);
        both.report("aten::copy_");
    }
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor &from, const at::Tensor &to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

c10::Scalar local_scalar(const at::Tensor &tensor) {
    Aliases aliases;
    const c10::Scalar value = at::_local_scalar_dense(aliases.of(tensor, Use::read));
    aliases.report("aten::_local_scalar_dense");
    synchronize(current_stream(aliases.device));
    return value;
}

void record_stream(at::Tensor &tensor, c10::Stream stream) {
    record_use(tensor.storage().data(), number_of(stream));
}

at::Tensor &set_storage(at::Tensor &tensor, c10::Storage storage, c10::SymInt offset, Sizes sizes,
                        Sizes strides) {
    c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(storage));
    impl->set_storage_offset(offset.expect_int());
    if (strides.empty() && !sizes.empty())
        impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
    else
        impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes),
                                    C10_AS_INTARRAYREF_SLOW(strides));
    return tensor;
}

at::Tensor &set_whole_storage(at::Tensor &tensor, c10::Storage storage) {
    const auto n = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
    return set_storage(tensor, std::move(storage), 0, {c10::SymInt(n)}, {c10::SymInt(1)});
}

at::Tensor convolution(const at::Tensor &input, const at::Tensor &weight,
                       const std::optional<at::Tensor> &bias, Sizes stride, Sizes padding,
                       Sizes dilation, bool transposed, Sizes output_padding, c10::SymInt groups) {
    Aliases a;
    std::optional<at::Tensor> cpu_bias;
    if (bias && bias->defined())
        cpu_bias = a.of(*bias, Use::read);
    const at::Tensor result = a.back(
        at::convolution_symint(a.of(input, Use::read), a.of(weight, Use::read), cpu_bias, stride,
                               padding, dilation, transposed, output_padding, groups));
    a.report("aten::convolution");
    return result;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor>
convolution_backward(const at::Tensor &grad, const at::Tensor &input, const at::Tensor &weight,
                     Sizes stride, Sizes padding, Sizes dilation, bool transposed,
                     Sizes output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
    Aliases a;
    const std::vector<c10::SymInt> bias_sizes = {grad.sym_size(1)};
    const auto [to_input, to_weight, to_bias] = at::convolution_backward_symint(
        a.of(grad, Use::read), a.of(input, Use::read), a.of(weight, Use::read),
        at::OptionalSymIntArrayRef(bias_sizes), stride, padding, dilation, transposed,
        output_padding, groups, mask);
    std::tuple<at::Tensor, at::Tensor, at::Tensor> results(a.back(to_input), a.back(to_weight),
                                                           a.back(to_bias));
    a.report("aten::convolution_backward");
    return results;
}

} // namespace
} // namespace fake

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", fake::empty);
    m.impl("empty_strided", fake::empty_strided);
    m.impl("_local_scalar_dense", fake::local_scalar);
    m.impl("record_stream", fake::record_stream);
    m.impl("set_.source_Storage", fake::set_whole_storage);
    m.impl("set_.source_Storage_storage_offset", fake::set_storage);
    fake::RecordedLibrary work{m};
    work.impl("_copy_from", fake::copy_from);
    work.impl("_copy_from_and_resize", fake::copy_from_and_resize);
    work.impl("convolution_overrideable", fake::convolution);
    work.impl("convolution_backward_overrideable", fake::convolution_backward);
}

// Lazily negated and conjugated tensors are copied as they are, by the CPU's
// copy_; PyTorch would resolve them by a copy, which comes here again.
TORCH_LIBRARY_IMPL(aten, Negative, m) {
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
