// SPDX-License-Identifier: BSD-3-Clause
// linear.cpp: panels of rows by the very function of MKL, or in 16 bits of oneDNN, that at::mm()
// calls for the whole.
#include "promises/linear.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <vector>

#include "base/mkl.h"
#include "base/parallel.h"
#include "base/plain_mode.h"
#include "guard.h"
#include "memory/memory.h"

namespace optfuse {
namespace {

// The function of Fortran: c = alpha a b + beta c by columns, m x n.
template <typename Real>
using Gemm = void (*)(const char *ta, const char *tb, const int *m, const int *n, const int *k,
                      const Real *alpha, const Real *a, const int *lda, const Real *b,
                      const int *ldb, const Real *beta, Real *c, const int *ldc);

template <typename Real> Gemm<Real> gemm();
template <> Gemm<float> gemm() {
    static const auto found = function_of_mkl<Gemm<float>>("sgemm_");
    return found;
}
template <> Gemm<double> gemm() {
    static const auto found = function_of_mkl<Gemm<double>>("dgemm_");
    return found;
}

// By columns dW is X' dY, k x n, and X and dY are transposed already.
template <typename Real>
void multiply(const at::Tensor &dy, const at::Tensor &x, int64_t first, int64_t end, void *out) {
    const SerialMkl alone;
    const int m = static_cast<int>(x.size(0)), n = static_cast<int>(dy.size(1));
    const int k = static_cast<int>(x.size(1)), rows = static_cast<int>(end - first);
    const Real one = 1, zero = 0;
    const auto *from = static_cast<const Real *>(data_of(dy.unsafeGetTensorImpl())) + first;
    gemm<Real>()("n", "t", &k, &rows, &m, &one,
                 static_cast<const Real *>(data_of(x.unsafeGetTensorImpl())), &k, from, &n, &zero,
                 static_cast<Real *>(out), &k);
}

bool is_16_bits(at::ScalarType dtype) {
    return dtype == at::kBFloat16 || dtype == at::kHalf;
}

// ATen's way to oneDNN: result = alpha a b + beta result. Whether PyTorch's settings allow oneDNN
// it does not ask. A release that has none promises no gradients of 16 bits.
using Mkldnn = void (*)(const at::Tensor &a, const at::Tensor &b, const at::Tensor &result,
                        float beta, float alpha);
Mkldnn mkldnn_matmul() {
    static const auto found = reinterpret_cast<Mkldnn>(
        find_in_libtorch("_ZN2at6native13mkldnn_matmulERKNS_6TensorES3_S3_ff"));
    return found;
}

// As long as one lives oneDNN computes on this thread alone, as it does inside a parallel region.
struct SerialOneDnn : Pinned {
    SerialOneDnn() { omp_set_num_threads(1); }
    ~SerialOneDnn() { omp_set_num_threads(before); }
    const int before = omp_get_max_threads();
};

void multiply_16_bits(const at::Tensor &dy, const at::Tensor &x, int64_t first, int64_t end,
                      void *out) {
    const SerialMkl alone;
    const SerialOneDnn alone_too;
    const PlainMode plain;
    mkldnn_matmul()(dy.slice(1, first, end).t(), x,
                    at::from_blob(out, {end - first, x.size(1)}, x.options()), 0, 1);
}

// oneDNN refuses them where the processor has no instructions for them.
bool can_multiply_16_bits(at::ScalarType dtype) {
    if (mkldnn_matmul() == nullptr)
        return false;
    try {
        const PlainMode plain;
        const at::Tensor one = at::ones({1, 1}, dtype);
        multiply_16_bits(one, one, 0, 1, data_of(at::ones({1, 1}, dtype).unsafeGetTensorImpl()));
        return true;
    } catch (const std::exception &) {
        return false;
    }
}

void copy_strided(char *to, const char *from, int64_t n, int64_t stride, size_t bytes) {
    if (stride == 1) {
        std::memcpy(to, from, static_cast<size_t>(n) * bytes);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        std::memcpy(to + static_cast<size_t>(i) * bytes,
                    from + i * stride * static_cast<int64_t>(bytes), bytes);
}

// The rows of a matrix one after the other. An operator would set this thread's number of threads
// (base/threads.h). PyTorch raises where the numbers are absent or late (memory.h).
void copy_rows(const at::Tensor &t, char *to) {
    constexpr int64_t kWorthAThread = 1 << 15;
    const auto bytes = static_cast<int64_t>(t.element_size());
    const int64_t columns = t.size(1), row = columns * bytes;
    const auto *from = static_cast<const char *>(t.const_data_ptr());
    in_parallel(t.size(0), kWorthAThread / std::max<int64_t>(columns, 1) + 1,
                [&](int64_t begin, int64_t end) {
                    for (int64_t i = begin; i < end; i++)
                        copy_strided(to + i * row, from + i * t.stride(0) * bytes, columns,
                                     t.stride(1), static_cast<size_t>(bytes));
                });
}

at::Tensor kept_copy(const at::Tensor &t) {
    const PlainMode plain;
    if (t.is_contiguous() && !OF_GUARD(factors_copied))
        return t.detach();
    at::Tensor copy = at::empty(t.sizes(), t.options().memory_format(at::MemoryFormat::Contiguous));
    copy_rows(t, static_cast<char *>(data_of(copy.unsafeGetTensorImpl())));
    return copy;
}

// The products of each row with each.
std::vector<double> gram_of(const at::Tensor &rows) {
    const SerialMkl alone;
    const int m = static_cast<int>(rows.size(0)), k = static_cast<int>(rows.size(1));
    const double one = 1, zero = 0;
    const auto *numbers = static_cast<const float *>(data_of(rows.unsafeGetTensorImpl()));
    const std::vector<double> wide(numbers, numbers + rows.numel());
    std::vector<double> products(static_cast<size_t>(m) * static_cast<size_t>(m));
    gemm<double>()("t", "n", &m, &m, &k, &one, wide.data(), &k, wide.data(), &k, &zero,
                   products.data(), &m);
    return products;
}

// 16 bits are cast to 32 under autocast.
int64_t rows_of_panel(const at::Tensor &dy, const at::Tensor &x) {
    const int64_t element = std::max<int64_t>(static_cast<int64_t>(x.element_size()), 4);
    return optfuse::rows_of_panel(dy.size(1), x.size(1) * element);
}

} // namespace

bool can_multiply(at::ScalarType dtype) {
    static const bool has_mkl = SerialMkl::is_possible();
    if (is_16_bits(dtype)) {
        static const bool brain = can_multiply_16_bits(at::kBFloat16);
        static const bool half = can_multiply_16_bits(at::kHalf);
        return dtype == at::kHalf ? half : brain;
    }
    const bool is_there = dtype == at::kFloat    ? gemm<float>() != nullptr
                          : dtype == at::kDouble ? gemm<double>() != nullptr
                                                 : false;
    return is_there && has_mkl;
}

LinearProduct::LinearProduct(const at::Tensor &dy, const at::Tensor &x)
    : WeightProduct(dy.size(1), x.size(1), x.scalar_type(), rows_of_panel(dy, x)),
      dy_(kept_copy(dy)), x_(kept_copy(x)) {}

// |dW|^2 is the sum over pairs of rows of X X' times dY dY', computed here in float64. An element of
// dW is a sum of m products, each of which passes at most m + 1 roundings in MKL, in whatever order;
// the sizes of all that is added up have a norm of at most `spread`. Where the result is below 1e19
// `spread` is below 1e27, so no sum on the way is infinite.
double LinearProduct::most_norm() const {
    const auto m = static_cast<size_t>(x_.size(0));
    const std::vector<double> xs = gram_of(x_), dys = gram_of(dy_);
    double squares = 0, spread = 0;
    for (size_t i = 0; i < m * m; i++)
        squares += xs[i] * dys[i];
    for (size_t i = 0; i < m * m; i += m + 1)
        spread += std::sqrt(xs[i] * dys[i]);
    const auto count = static_cast<double>(m);
    const double here = (static_cast<double>(rows() + columns()) + count * count + 8) * 0x1p-52;
    const double rounded = std::expm1((count + 2) * kRounding) * spread;
    const double denormals = count * std::sqrt(static_cast<double>(numel())) * 0x1p-126;
    const double exact = std::sqrt(std::max(squares, 0.0) + here * spread * spread); // NaN stays
    return (exact + rounded) * (1 + here) + denormals;
}

void LinearProduct::fill(int64_t first, int64_t end, void *out) const {
    if (is_16_bits(dtype()))
        multiply_16_bits(dy_, x_, first, end, out);
    else if (dtype() == at::kFloat)
        multiply<float>(dy_, x_, first, end, out);
    else
        multiply<double>(dy_, x_, first, end, out);
}

} // namespace optfuse
