// SPDX-License-Identifier: BSD-3-Clause
// trial_matrices.h: matrices on which a trial compares two ways of making a product by their bits, and
// all beside its operands that may change how PyTorch multiplies.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

#include "base/trial_numbers.h"

namespace optfuse {

// Numbers of all magnitudes; row by row such that sums cancel; such that products are around the
// least that is no denormal, which some threads may take for zeros; and with infinities and the
// like. MIXED: each of four columns has one of these, so that four by four elements of a product
// X' Y meet all pairs.
enum class TrialNumbers { SPREAD, CANCELLING, TINY, SPECIAL, MIXED };

constexpr std::array<TrialNumbers, 4> kTrialNumbers = {
    TrialNumbers::SPREAD, TrialNumbers::CANCELLING, TrialNumbers::TINY, TrialNumbers::SPECIAL};

// The bytes between the beginning of a cache line and that of the tensor.
int64_t offset_in_line(const at::Tensor &t);

// A matrix of such numbers with the sizes, the strides and the offset in a cache line of this one.
at::Tensor trial_matrix(const at::Tensor &like, TrialNumbers numbers, Draws &draws);

// Threads, denormals, precision, determinism: of this thread and of the process.
using ProductSettings = std::array<int64_t, 9>;
ProductSettings product_settings();

} // namespace optfuse
