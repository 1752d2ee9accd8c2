// SPDX-License-Identifier: BSD-3-Clause
// reference.h: the updates whose bits the kernels for GPUs have, by PyTorch's operators.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace optfuse {

using Tensors = std::vector<at::Tensor>;

struct GpuReference {
    const char *rule;
    const char *name; // of the operators, in errors
    // Updates all parameters. step: how many updates that makes; state: in the rule's order, empty
    // where it is not used.
    void (*update)(const std::vector<double> &hyper, int step, const Tensors &params, Tensors grads,
                   const std::vector<Tensors> &state);
};

// The rules of Adam, SGD, RMSprop and Adagrad have one. Throws for others.
const GpuReference &gpu_reference(const char *rule);

} // namespace optfuse
