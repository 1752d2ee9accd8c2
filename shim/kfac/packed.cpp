// SPDX-License-Identifier: BSD-3-Clause
// packed.cpp: see packed.h.
#include "kfac/packed.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/triu_indices.h>
#include <ATen/ops/zeros.h>

#include "error.h"

namespace optfuse {
namespace {

const of_packing_row &row_for(const at::Tensor &t) {
    const of_packing_row *row = nullptr;
    if (t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble)
        row = of_packing_find(t.scalar_type() == at::kFloat ? OF_FLOAT32 : OF_FLOAT64,
                              of_isa_detect());
    if (row == nullptr || !t.is_contiguous())
        fail("optfuse: factors are contiguous, and float32 or float64");
    return *row;
}

// Where the upper triangle is in a contiguous matrix.
at::Tensor triangle(int64_t d, const at::Tensor &like) {
    const at::Tensor places = at::triu_indices(d, d, 0, like.options().dtype(at::kLong));
    return places.select(0, 0).mul(d).add(places.select(0, 1));
}

} // namespace

void add_packed(const at::Tensor &packed, const at::Tensor &matrix, double scale) {
    const int64_t d = matrix.size(0);
    if (!packed.is_cpu()) {
        packed.add_(matrix.reshape({-1}).index_select(0, triangle(d, matrix)), scale);
        return;
    }
    const auto size = static_cast<size_t>(d);
    row_for(packed).add(packed.mutable_data_ptr(), matrix.const_data_ptr(), size, size, scale);
}

void merge_packed(const at::Tensor &running, const at::Tensor &sums, double decay, double weight) {
    if (!running.is_cpu()) {
        running.mul_(decay).add_(sums, weight);
        return;
    }
    row_for(running).merge(running.mutable_data_ptr(), sums.const_data_ptr(),
                           static_cast<size_t>(running.numel()), decay, weight);
}

at::Tensor unpacked(const at::Tensor &packed, int64_t d, double damping) {
    if (!packed.is_cpu()) {
        const at::Tensor upper = at::zeros({d, d}, packed.options());
        upper.view({-1}).index_copy_(0, triangle(d, packed), packed);
        const at::Tensor full = upper.add(upper.triu(1).t());
        full.diagonal().add_(damping);
        return full;
    }
    const at::Tensor full = at::empty({d, d}, packed.options());
    const auto size = static_cast<size_t>(d);
    row_for(packed).unpack(full.mutable_data_ptr(), packed.const_data_ptr(), size, size, damping);
    return full;
}

} // namespace optfuse
