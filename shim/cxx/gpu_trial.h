// SPDX-License-Identifier: BSD-3-Clause
// gpu_trial.h: before the first update on a GPU: do its kernels give PyTorch's bits there?
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace optfuse {

// Rules whose kernels have the roundings of a fused operator of PyTorch. Python tries the others
// against the class's own step(), on each GPU.
bool has_gpu_reference(const char *rule);

// Whether the update of such a rule has other bits than PyTorch's fused operator, with these
// options, on the parameter's GPU and in its dtype. Looks once. Throws if there are no kernels,
// or if they are off by more than rounding; label: of the parameter.
bool gpu_bits_differ(const char *rule, std::vector<double> hyper, const at::Tensor &param,
                     const std::string &label);

} // namespace optfuse
