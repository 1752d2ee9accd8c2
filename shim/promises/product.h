// SPDX-License-Identifier: BSD-3-Clause
// product.h: the gradient of a weight as a product of two thin matrices. They are copies, so that
// nobody else can write to them. Any thread computes, any part at any time.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "tensor/parallel.h"

namespace optfuse {

// dW, rows x columns, of the weight's layout.
class WeightProduct {
  public:
    virtual ~WeightProduct() = default;
    WeightProduct &operator=(const WeightProduct &) = delete;

    int64_t rows() const { return rows_; }
    int64_t columns() const { return columns_; }
    // How many rows are computed at a time: the product's bits may depend on that.
    int64_t panel_rows() const { return panel_rows_; }
    // Calls work(first, end) for the rows of each panel, on all threads. It must not throw.
    template <class Work> void each_panel(const Work &work) const {
        const int64_t panels = (rows_ + panel_rows_ - 1) / panel_rows_;
        in_parallel(panels, 1, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; i++)
                work(i * panel_rows_, std::min((i + 1) * panel_rows_, rows_));
        });
    }
    size_t row_bytes() const { return static_cast<size_t>(columns_) * c10::elementSize(dtype_); }
    size_t nbytes() const { return static_cast<size_t>(rows_) * row_bytes(); } // of dW
    at::ScalarType dtype() const { return dtype_; }

    // Rows [first, end) of dW, one after the other; the first is a panel's first, and the end the
    // panel's. False: there is no memory.
    bool compute(int64_t first, int64_t end, void *out) const;
    // All of it, on all threads. Throws.
    void compute_all(void *out) const;
    // A panel in memory of the calling thread, until its next call; null: there is no memory.
    const void *panel(int64_t first, int64_t end) const;
    // The same gradient cast to another dtype element by element; null: it can't be promised.
    virtual std::shared_ptr<const WeightProduct> cast(at::ScalarType dtype) const = 0;

  protected:
    WeightProduct(int64_t rows, int64_t columns, at::ScalarType dtype, int64_t panel_rows);
    WeightProduct(const WeightProduct &) = default;
    virtual bool fill(int64_t first, int64_t end, void *out) const = 0; // see compute()

    int64_t rows_, columns_;
    at::ScalarType dtype_;
    int64_t panel_rows_;

  private:
    unsigned floating_; // floating.h: of the thread that made it
};

// The gradient of a linear layer's weight: dW = dY' X.
class LinearProduct final : public WeightProduct {
  public:
    // dy: m x n, x: m x k, of one dtype that can_multiply(), on the CPU; with any strides.
    LinearProduct(const at::Tensor &dy, const at::Tensor &x);
    // Null unless the factors have 16 bits.
    std::shared_ptr<const WeightProduct> cast(at::ScalarType dtype) const override;

  private:
    bool fill(int64_t first, int64_t end, void *out) const override;
    bool fill_16_bits(int64_t first, int64_t end, void *out) const;
    bool fill_cast(int64_t first, int64_t end, void *out) const;

    at::Tensor dy_, x_;
};

// So many rows that a panel fits the cache of a core, and that there are as many panels for each
// thread as for the others, if there are enough rows.
int64_t rows_of_panel(int64_t rows, int64_t row_bytes);

// Whether this machine's libraries for matrices have what compute() calls.
bool can_multiply(at::ScalarType dtype);

} // namespace optfuse
