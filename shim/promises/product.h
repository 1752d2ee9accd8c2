// SPDX-License-Identifier: BSD-3-Clause
// product.h: the gradient of a linear layer's weight, dW = dY' X, as its two factors.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>

#include "tensor/parallel.h"

namespace optfuse {

// Copies of dY and X, so that nobody else can write to them. Any thread computes, any part at any
// time.
class WeightProduct {
  public:
    // dy: m x n, x: m x k, of one dtype that can_multiply(), on the CPU; with any strides.
    WeightProduct(const at::Tensor &dy, const at::Tensor &x);
    // The same gradient, whose factors have 16 bits, cast to another dtype element by element.
    WeightProduct(const WeightProduct &of, at::ScalarType dtype);
    bool has_16_bits() const { return x_.element_size() == 2; }

    int64_t rows() const { return dy_.size(1); }
    int64_t columns() const { return x_.size(1); }
    // How many rows are computed at a time: the product's bits may depend on that.
    int64_t panel_rows() const { return panel_rows_; }
    // Calls work(first, end) for the rows of each panel, on all threads. It must not throw.
    template <class Work> void each_panel(const Work &work) const {
        const int64_t panels = (rows() + panel_rows_ - 1) / panel_rows_;
        in_parallel(panels, 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++)
                work(i * panel_rows_, std::min((i + 1) * panel_rows_, rows()));
        });
    }
    size_t row_bytes() const { return static_cast<size_t>(columns()) * c10::elementSize(dtype_); }
    size_t nbytes() const { return static_cast<size_t>(rows()) * row_bytes(); } // of dW
    at::ScalarType dtype() const { return dtype_; }

    // Rows [first, end) of dW, one after the other; the first is a panel's first, and the end the
    // panel's. False: there is no memory.
    bool compute(int64_t first, int64_t end, void *out) const;
    // All of it, on all threads. Throws.
    void compute_all(void *out) const;
    // A panel in memory of the calling thread, until its next call; null: there is no memory.
    const void *panel(int64_t first, int64_t end) const;

  private:
    bool compute_16_bits(int64_t first, int64_t end, void *out) const;
    bool compute_cast(int64_t first, int64_t end, void *out) const;

    at::Tensor dy_, x_;
    at::ScalarType dtype_;
    int64_t panel_rows_;
    unsigned floating_; // floating.h: of the thread that copied them
};

// Whether this machine's libraries for matrices have what compute() calls.
bool can_multiply(at::ScalarType dtype);

} // namespace optfuse
