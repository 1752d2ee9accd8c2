// SPDX-License-Identifier: BSD-3-Clause
// fallback.cpp: every operator that has no kernel of its own on this device:
// the CPU's, on the same memory.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include "aliases.h"
#include "graphs.h"

namespace fake {
namespace {

// Views touch no element; out= and in-place arguments are written, and all
// else is read.
Use use_of(const c10::Argument &argument) {
    const c10::AliasInfo *info = argument.alias_info();
    if (info == nullptr)
        return Use::read;
    bool write = info->isWrite();
    for (const c10::AliasInfo &inner : info->containedTypes())
        write = write || inner.isWrite();
    return write ? Use::write : Use::none;
}

c10::IValue alias_value(Aliases *aliases, const c10::IValue &value, Use use) {
    if (value.isDevice() && value.toDevice().type() == kDevice) {
        const c10::Device device = value.toDevice();
        aliases->device = device.has_index() ? device.index() : current_device();
        return c10::Device(c10::kCPU);
    }
    return mapped(value, [&](const at::Tensor &tensor) { return aliases->of(tensor, use); });
}

// Numbers that the host gets, and shapes that depend on them, make it wait.
bool makes_host_wait(const c10::FunctionSchema &schema) {
    static const char *const names[] = {"aten::nonzero", "aten::masked_select", "aten::_unique2",
                                        "aten::unique_consecutive", "aten::unique_dim"};
    for (const char *name : names)
        if (schema.name() == name)
            return true;
    for (const c10::Argument &result : schema.returns())
        if (!result.type()->isSubtypeOf(*c10::TensorType::get()) &&
            !result.type()->isSubtypeOf(*c10::ListType::ofTensors()))
            return true;
    return false;
}

} // namespace

void fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack) {
    const c10::FunctionSchema &schema = op.schema();
    const size_t n = schema.arguments().size();
    Aliases aliases;
    const size_t first = stack->size() - n;
    for (size_t i = 0; i < n; i++) // as on a GPU
        TORCH_CHECK(!(*stack)[first + i].isGenerator(), schema.name(),
                    ": expected a generator of this device, found one of the CPU");
    for (size_t i = 0; i < n; i++) // the device, before a kernel that has no tensors needs it
        (*stack)[first + i] =
            alias_value(&aliases, (*stack)[first + i], use_of(schema.arguments()[i]));
    TORCH_CHECK(aliases.device != -1, schema.name(), ": no tensor and no device");
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    aliases.settle();
    const size_t results = schema.returns().size();
    for (size_t i = stack->size() - results; i < stack->size(); i++)
        (*stack)[i] = mapped((*stack)[i], [&](const at::Tensor &t) { return aliases.back(t); });
    aliases.report(schema.name());
    if (makes_host_wait(schema))
        synchronize(current_stream(aliases.device));
}

} // namespace fake

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(fake::recorded(c10::KernelFunction::makeFromBoxedFunction<&fake::fallback>()));
}

// PyTorch composes these of others where the device has no kernel for them; the
// CPU rounds differently, or warns.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    for (const char *name : {"native_layer_norm", "native_group_norm", "mse_loss"})
        m.impl(name, fake::recorded(c10::KernelFunction::makeFromBoxedFunction<&fake::fallback>()));
}
