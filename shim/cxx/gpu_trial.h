// SPDX-License-Identifier: BSD-3-Clause
// gpu_trial.h: before the first update on a GPU: do its kernels give PyTorch's bits there?
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "optfuse.h"

namespace optfuse {

// Whether the update of the rule has other bits than its reference (gpu_reference.h), with these
// options, on the parameter's GPU and in its dtype. Looks once. Throws if there are no kernels, or
// if they are off by more than rounding; label: of the parameter.
bool gpu_bits_differ(const of_rule &rule, std::vector<double> hyper, const at::Tensor &param,
                     const std::string &label);

} // namespace optfuse
