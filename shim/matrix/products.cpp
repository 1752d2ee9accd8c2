// SPDX-License-Identifier: BSD-3-Clause
// products.cpp: with the usual settings PyTorch's operators end in the very same call of
// cuBLAS on the same handle (ATen/native/cuda/Blas.cpp and ATen/cuda/CUDABlas.cpp).
#include "matrix/products.h"

#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>

#include <atomic>

#include "matrix/blas.h"
#include "optfuse.h"

namespace optfuse {
namespace {

std::atomic<int64_t> n_by_cublas{0};

// As in PyTorch: what is not contiguous is the transpose of what is.
of_matrix matrix_of(const at::Tensor &x) {
    const bool transposed = !x.is_contiguous();
    const int64_t rows = transposed ? 1 : 0;
    return {x.data_ptr(), x.size(rows), x.size(1 - rows), x.stride(rows), transposed};
}

} // namespace

at::Tensor by_operators(const Product &p) {
    return p.c == nullptr ? at::mm(p.a, p.b) : at::addmm(*p.c, p.a, p.b, p.beta, p.alpha);
}

at::Tensor by_cublas(const Product &p) {
    at::Tensor out = at::empty({p.a.size(0), p.b.size(1)}, p.a.options());
    if (p.beta != 0)
        out.copy_(*p.c);
    const of_matrix a = matrix_of(p.a), b = matrix_of(p.b), c = matrix_of(out);
    if (!of_blas_product(OF_BFLOAT16, p.alpha, &a, &b, p.beta, &c))
        return {};
    n_by_cublas++;
    return out;
}

int64_t products_by_cublas() { return n_by_cublas; }

std::string other_settings() {
    at::Context &torch = at::globalContext();
    const at::BlasBackend backend = torch.blasPreferredBackend();
    if (backend != at::BlasBackend::Default && backend != at::BlasBackend::Cublas)
        return "PyTorch's preferred BLAS library is not cuBLAS";
    if (torch.allowBF16ReductionCuBLAS() !=
        at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK)
        return "allow_bf16_reduced_precision_reduction is off";
    if (torch._SMCarveout_EXPERIMENTAL())
        return "some of the GPU's processors are kept from matrix products";
    return of_blas_is_untuned() ? "" : taken_error();
}

std::string taken_error() {
    std::string why = of_error_message();
    of_set_error("%s", "");
    return why;
}

} // namespace optfuse
