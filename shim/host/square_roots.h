// SPDX-License-Identifier: BSD-3-Clause
// square_roots.h: square roots with the bits of PyTorch's operator.
#pragma once

#include <cstddef>

namespace optfuse {

// n values of float32; of float64.
void square_roots_of_floats(void *values, size_t n);
void square_roots_of_doubles(void *values, size_t n);

} // namespace optfuse
