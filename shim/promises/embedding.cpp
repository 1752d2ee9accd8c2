// SPDX-License-Identifier: BSD-3-Clause
// embedding.cpp: see embedding.h. PyTorch adds the rows of dY in the order of tokens to a weight's
// row of +0.
#include "promises/embedding.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "base/plain_mode.h"
#include "memory/memory.h"

namespace optfuse {
namespace {

at::Tensor copied(const at::Tensor &t, at::ScalarType dtype) {
    const PlainMode plain;
    return at::empty(t.sizes(), at::TensorOptions(dtype)).copy_(t);
}

} // namespace

EmbeddingProduct::EmbeddingProduct(const at::Tensor &dy, const at::Tensor &indices, int64_t rows,
                                   int64_t padding)
    : WeightProduct(rows, dy.size(1), dy.scalar_type(),
                    rows_of_panel(rows, dy.size(1) * static_cast<int64_t>(dy.element_size()))),
      dy_(copied(dy, dy.scalar_type())) {
    const at::Tensor wide = copied(indices, at::kLong);
    const auto *at = static_cast<const int64_t *>(data_of(wide.unsafeGetTensorImpl()));
    for (int64_t token = 0; token < wide.numel(); token++)
        if (at[token] != padding)
            uses_.push_back({at[token], token});
    std::stable_sort(uses_.begin(), uses_.end(),
                     [](const Use &a, const Use &b) { return a.row < b.row; });
}

template <typename Real>
void EmbeddingProduct::add_rows(int64_t first, int64_t end, Real *out) const {
    const auto *dy = static_cast<const Real *>(data_of(dy_.unsafeGetTensorImpl()));
    auto use = std::lower_bound(uses_.begin(), uses_.end(), first,
                                [](const Use &a, int64_t row) { return a.row < row; });
    for (; use != uses_.end() && use->row < end; ++use) {
        Real *to = out + (use->row - first) * columns();
        const Real *from = dy + use->token * columns();
        for (int64_t i = 0; i < columns(); i++)
            to[i] += from[i];
    }
}

// A row of the weight is at most the sum of those of its tokens.
double EmbeddingProduct::most_norm() const {
    const auto *dy = static_cast<const float *>(data_of(dy_.unsafeGetTensorImpl()));
    double squares = 0, row = 0;
    for (size_t i = 0; i < uses_.size(); i++) {
        const float *from = dy + uses_[i].token * columns();
        row += std::sqrt(std::inner_product(from, from + columns(), from, 0.0, std::plus<>(),
                                            std::multiplies<double>()));
        if (i + 1 == uses_.size() || uses_[i + 1].row != uses_[i].row)
            squares += row * row, row = 0;
    }
    return std::sqrt(squares) * most_rounded_up(static_cast<double>(uses_.size() + 8));
}

void EmbeddingProduct::fill(int64_t first, int64_t end, void *out) const {
    std::memset(out, 0, static_cast<size_t>(end - first) * row_bytes());
    if (dtype() == at::kFloat)
        add_rows(first, end, static_cast<float *>(out));
    else
        add_rows(first, end, static_cast<double *>(out));
}

} // namespace optfuse
