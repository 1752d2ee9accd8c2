// SPDX-License-Identifier: BSD-3-Clause
// trial.h: before the first update on a GPU: do its kernels give PyTorch's bits there?
#pragma once

#include <c10/core/TensorOptions.h>

#include <string>
#include <vector>

#include "optfuse.h"

namespace optfuse {

// Whether the update of the rule has other bits than its reference (reference.h), with these
// options, on that GPU and in that dtype. Looks once. Throws if there are no kernels, or if they
// are off by more than rounding; label: of a parameter there. mixed: with bfloat16 state, of float32
// parameters.
bool gpu_bits_differ(const of_rule &rule, std::vector<double> hyper, at::TensorOptions there,
                     const std::string &label, bool mixed);

} // namespace optfuse
