// SPDX-License-Identifier: BSD-3-Clause
// embedding.h: the gradient of an embedding's weight, dW = S' dY, where each row of S has a single
// one, in the column of a token's index.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "promises/product.h"

namespace optfuse {

class EmbeddingProduct final : public WeightProduct {
  public:
    // dy: tokens x k, dense, float32 or float64, on the CPU. indices: of the tokens, int32 or
    // int64, from 0 to rows - 1. Tokens with the index `padding` contribute nothing; -1: all do.
    EmbeddingProduct(const at::Tensor &dy, const at::Tensor &indices, int64_t rows,
                     int64_t padding);
    size_t factor_bytes() const override { return dy_.nbytes() + uses_.size() * sizeof(Use); }

  private:
    struct Use {
        int64_t row, token;
    };
    void fill(int64_t first, int64_t end, void *out) const override;
    double most_norm() const override;
    template <typename Real> void add_rows(int64_t first, int64_t end, Real *out) const;

    at::Tensor dy_;
    std::vector<Use> uses_; // by rows, those of a row in the order of tokens
};

} // namespace optfuse
