// SPDX-License-Identifier: BSD-3-Clause
// packed.h: symmetric matrices as their upper triangles by rows (kernels/packing.h), on the CPU
// and on GPUs: with the same bits.
#pragma once

#include <ATen/core/Tensor.h>

#include "packing.h"

namespace optfuse {

inline int64_t packed_size(int64_t d) {
    return static_cast<int64_t>(of_packed_elements(static_cast<size_t>(d)));
}

// packed += scale * matrix. packed: contiguous, of packed_size(d) elements; matrix (d, d),
// contiguous; both float32 or float64.
void add_packed(const at::Tensor &packed, const at::Tensor &matrix, double scale);
// running = decay * running + weight * sums; both packed.
void merge_packed(const at::Tensor &running, const at::Tensor &sums, double decay, double weight);
// The whole matrix, with damping added to its diagonal.
at::Tensor unpacked(const at::Tensor &packed, int64_t d, double damping);

} // namespace optfuse
