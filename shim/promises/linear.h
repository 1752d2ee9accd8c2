// SPDX-License-Identifier: BSD-3-Clause
// linear.h: the gradient of a linear layer's weight, dW = dY' X.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "promises/product.h"

namespace optfuse {

class LinearProduct final : public WeightProduct {
  public:
    // dy: m x n, x: m x k, of one dtype that can_multiply(), on the CPU; with any strides.
    LinearProduct(const at::Tensor &dy, const at::Tensor &x);
    size_t factor_bytes() const override { return dy_.nbytes() + x_.nbytes(); }

  private:
    void fill(int64_t first, int64_t end, void *out) const override;
    double most_norm() const override;

    at::Tensor dy_, x_;
};

// Whether this machine's libraries for matrices have what a LinearProduct of this dtype calls.
bool can_multiply(at::ScalarType dtype);

} // namespace optfuse
