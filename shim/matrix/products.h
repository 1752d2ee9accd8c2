// SPDX-License-Identifier: BSD-3-Clause
// products.h: one product of matrices in bfloat16, by PyTorch's operators or, on a GPU,
// by a call of cuBLAS (blas.h) that needs neither the dispatcher nor its checks.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace optfuse {

// alpha a b + beta c; without c, a b.
struct Product {
    const at::Tensor &a, &b;
    double alpha = 1;
    const at::Tensor *c = nullptr;
    double beta = 0;
};

at::Tensor by_operators(const Product &p);

// The product of dense matrices of at least two rows and columns, on the current device. Undefined:
// nothing was launched, and of_error_message() says why.
at::Tensor by_cublas(const Product &p);
int64_t products_by_cublas(); // so far, in this process

// The setting of PyTorch that makes its operators multiply in another way than by_cublas();
// empty if none does.
std::string other_settings();

// The error of this thread, which is cleared.
std::string taken_error();

} // namespace optfuse
