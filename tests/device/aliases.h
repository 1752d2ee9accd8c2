// SPDX-License-Identifier: BSD-3-Clause
// aliases.h: CPU tensors over the device's memory, with which the CPU's
// operators compute in the device's place.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>
#include <vector>

#include "device.h"

namespace fake {

enum class Use { none, read, write }; // what an operator does with the elements

// The aliases of one call of an operator.
class Aliases {
  public:
    // A CPU tensor over the same memory; what is not on the device, as it is.
    at::Tensor of(const at::Tensor &tensor, Use use);
    // The tensor that the operator returned: one of the tensors above, a view of one of
    // them, or moved to the device.
    at::Tensor back(const at::Tensor &result);
    // Operators may give their tensors other sizes, strides, memory.
    void settle();
    // The call as a launch on the current stream of the device.
    void report(const std::string &name) const;

    // The device of the tensors, or of the one that will be made; -1 if there is none yet.
    c10::DeviceIndex device = -1;

  private:
    struct Pair {
        at::Tensor mine, cpu;
        Use use;
    };
    c10::Storage alias_of(const c10::Storage &storage, Use use);
    c10::Storage *device_storage(const c10::Storage &cpu);
    at::Tensor move(const at::Tensor &cpu);

    std::vector<Pair> pairs_;
    std::vector<std::pair<c10::Storage, c10::Storage>> storages_; // the device's, the CPU's
    std::vector<at::Tensor> made_;
};

bool is_mine(const at::Tensor &tensor);

// A tensor over the same memory, which does not keep it.
at::Tensor borrowed(const at::Tensor &tensor);

// The value with each of its tensors exchanged.
template <class F> c10::IValue mapped(const c10::IValue &value, F of) {
    if (value.isTensor())
        return of(value.toTensor());
    if (value.isTensorList()) {
        std::vector<at::Tensor> list = value.toTensorVector();
        for (at::Tensor &tensor : list)
            tensor = of(tensor);
        return c10::List<at::Tensor>(list);
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
            list.push_back(tensor ? std::optional(of(*tensor)) : tensor);
        return list;
    }
    return value;
}

// The CPU's operator on the same memory.
void fallback(const c10::OperatorHandle &op, torch::jit::Stack *stack);

// Whether operators on one tensor round as CUDA's (pointwise.cpp), and not as the CPU's.
bool rounds_as_cuda();

// The bytes between a tensor's first and last element.
Range range_of(const at::Tensor &tensor, bool write);
// And work on the current stream of the device is about to use them.
Range arrived(const at::Tensor &tensor, bool write, c10::DeviceIndex device);

} // namespace fake
