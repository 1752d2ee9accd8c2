// SPDX-License-Identifier: BSD-3-Clause
// product.h: the gradient of a weight as a product of two thin matrices (linear.h, embedding.h),
// its cast, or a sum of such. The factors are copies, so that nobody else can write to them. Any
// thread computes, any part at any time.
#pragma once

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "base/parallel.h"
#include "base/pinned.h"
#include "memory/absent.h"

namespace optfuse {

// dW, rows x columns, of the weight's layout.
class WeightProduct : public Computable, Pinned {
  public:
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
    size_t panel_bytes() const { return static_cast<size_t>(panel_rows_) * row_bytes(); }
    size_t nbytes() const { return static_cast<size_t>(rows_) * row_bytes(); } // of dW
    size_t numel() const override { return static_cast<size_t>(rows_ * columns_); }
    at::ScalarType dtype() const { return dtype_; }
    virtual size_t factor_bytes() const = 0;

    // Rows [first, end) of dW, one after the other; the first is a panel's first, and the end the
    // panel's. Throws.
    void compute(int64_t first, int64_t end, void *out) const;
    void compute_all(void *out) const override; // on all threads
    bool has_denormals() const { return floating_ == 0; } // else they count as zeros
    // A panel in memory of the calling thread, until its next call; null after of_set_error().
    const void *panel(int64_t first, int64_t end) const;

  protected:
    WeightProduct(int64_t rows, int64_t columns, at::ScalarType dtype, int64_t panel_rows);
    virtual void fill(int64_t first, int64_t end, void *out) const = 0; // compute(); may throw

  private:
    const int64_t rows_, columns_;
    const at::ScalarType dtype_;
    const int64_t panel_rows_;
    const unsigned floating_; // floating.h: of the thread that made it
};

using SharedProduct = std::shared_ptr<const WeightProduct>;

// The same gradient cast to another dtype, element by element.
SharedProduct cast_product(SharedProduct product, at::ScalarType dtype);
// a + b as autograd adds gradients up; null: they are of other forms.
SharedProduct sum_of_products(const SharedProduct &a, SharedProduct b);

// So many rows that a panel fits the cache of a core, and that there are as many panels for each
// thread as for the others, if there are enough rows.
int64_t rows_of_panel(int64_t rows, int64_t row_bytes);

} // namespace optfuse
