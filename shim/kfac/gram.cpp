// SPDX-License-Identifier: BSD-3-Clause
// gram.cpp: see gram.h. No column of ones is ever made: its products are the sums of columns.
#include "kfac/gram.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/im2col.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace optfuse {
namespace {

constexpr int64_t patch_bytes = 8 << 20; // in memory at once

struct Gram {
    Gram(int64_t d, bool with_ones, const at::TensorOptions &options)
        : matrix(at::zeros({d + with_ones, d + with_ones}, options)),
          products(matrix.narrow(0, 0, d).narrow(1, 0, d)), ones(with_ones) {
        if (ones)
            sums = at::zeros({d}, options);
    }
    void add(const at::Tensor &rows) {
        products.addmm_(rows.t(), rows);
        if (ones)
            sums.add_(rows.sum(0));
        n += rows.size(0);
    }
    at::Tensor finish() {
        if (ones) {
            const int64_t d = sums.size(0);
            matrix.select(1, d).narrow(0, 0, d).copy_(sums);
            matrix.select(0, d).narrow(0, 0, d).copy_(sums);
            matrix.select(0, d).select(0, d).fill_(static_cast<double>(n));
        }
        return matrix;
    }

    at::Tensor matrix, products, sums;
    bool ones;
    int64_t n = 0;
};

} // namespace

at::Tensor gram_of_rows(const at::Tensor &rows, bool ones, at::ScalarType type) {
    Gram gram(rows.size(1), ones, rows.options().dtype(type));
    gram.add(rows.to(type));
    return gram.finish();
}

at::Tensor gram_of_patches(const at::Tensor &images, const ConvOptions &conv,
                           at::IntArrayRef kernel, bool ones, at::ScalarType type) {
    const int64_t d = images.size(1) * kernel[0] * kernel[1], n = images.size(0);
    const auto bytes = static_cast<int64_t>(c10::elementSize(type));
    const int64_t at_once =
        std::max<int64_t>(1, patch_bytes / (bytes * d * conv.positions(images.sizes(), kernel)));
    Gram gram(d, ones, images.options().dtype(type));
    for (int64_t at = 0; at < n; at += at_once) {
        const at::Tensor part = images.narrow(0, at, std::min(at_once, n - at)).to(type);
        const at::Tensor patches =
            at::im2col(part, kernel, conv.dilation, conv.padding, conv.stride);
        gram.add(patches.transpose(1, 2).reshape({-1, d}));
    }
    return gram.finish();
}

} // namespace optfuse
