// SPDX-License-Identifier: BSD-3-Clause
// gram.h: the products of which Kronecker factors are sums (arXiv 1503.05671; of convolutions,
// arXiv 1602.01407). Results are symmetric matrices of the type asked for.
#pragma once

#include <ATen/core/Tensor.h>

#include "layers/layer.h"

namespace optfuse {

// X'X of rows (n, d). ones: as if each row ended with a 1.
at::Tensor gram_of_rows(const at::Tensor &rows, bool ones, at::ScalarType type);
// P'P, with a row of P for each patch of the images that the convolution multiplies with its
// weight, in the order of weight.view(out, -1).
at::Tensor gram_of_patches(const at::Tensor &images, const ConvOptions &conv,
                           at::IntArrayRef kernel, bool ones, at::ScalarType type);

} // namespace optfuse
