// SPDX-License-Identifier: BSD-3-Clause
// exchange.h: tensors that change places with others of the same sizes, strides and dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace optfuse {

// a[i] gets the values of b[i], and b[i] those of a[i]; both versions go up. Nothing is copied
// where PyTorch allocated both memories on the CPU and nobody else knows them: then the
// tensors exchange their memories. in_place[i] != 0: never that of a[i], whose address somebody
// has.
void exchange(const std::vector<at::Tensor> &a, const std::vector<at::Tensor> &b,
              const std::vector<int64_t> &in_place);

} // namespace optfuse
