// SPDX-License-Identifier: BSD-3-Clause
// product.cpp: panels of rows by the very function of MKL that at::mm() calls for the whole.
#include "promises/product.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "floating.h"
#include "guard.h"
#include "matrix/mkl.h"
#include "tensor/memory.h"
#include "tensor/parallel.h"
#include "tensor/plain_mode.h"

namespace optfuse {
namespace {

// A panel, and the rows of parameter and state beside it, fit the cache of a core, and a product of
// so many rows runs at its full speed.
constexpr int64_t kPanelBytes = 512 << 10;
// Rows are taken by so many: a panel then begins where a cache line does, whatever their length.
constexpr int64_t kRows = 32;

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

at::Tensor kept_copy(const at::Tensor &t) {
    const PlainMode plain;
    if (t.is_contiguous() && !OF_GUARD(factors_copied))
        return t.detach();
    return at::empty(t.sizes(), t.options().memory_format(at::MemoryFormat::Contiguous)).copy_(t);
}

// As many panels for each thread as for the others, if there are enough rows.
int64_t rows_of_panel(int64_t rows, int64_t row_bytes) {
    const int64_t threads = thread_count();
    const int64_t least = (rows * row_bytes + kPanelBytes - 1) / kPanelBytes;
    const int64_t panels = std::max<int64_t>((least + threads - 1) / threads * threads, 1);
    const int64_t of_each = (rows + panels - 1) / panels;
    return (of_each + kRows - 1) / kRows * kRows;
}

struct Free {
    void operator()(void *memory) const { std::free(memory); }
};

} // namespace

bool can_multiply(at::ScalarType dtype) {
    const bool is_there = dtype == at::kFloat    ? gemm<float>() != nullptr
                          : dtype == at::kDouble ? gemm<double>() != nullptr
                                                 : false;
    return is_there && SerialMkl::is_possible();
}

WeightProduct::WeightProduct(const at::Tensor &dy, const at::Tensor &x)
    : dy_(kept_copy(dy)), x_(kept_copy(x)),
      panel_rows_(rows_of_panel(rows(), columns() * static_cast<int64_t>(x_.element_size()))),
      floating_(of_floating_now()) {}

void WeightProduct::compute(int64_t first, int64_t end, void *out) const {
    const unsigned outside = of_floating_now();
    of_floating_set(floating_);
    if (dtype() == at::kFloat)
        multiply<float>(dy_, x_, first, end, out);
    else
        multiply<double>(dy_, x_, first, end, out);
    of_floating_set(outside);
}

void WeightProduct::compute_all(void *out) const {
    each_panel([&](int64_t first, int64_t end) {
        compute(first, end, static_cast<char *>(out) + static_cast<size_t>(first) * row_bytes());
    });
}

const void *WeightProduct::panel(int64_t first, int64_t end) const {
    thread_local std::unique_ptr<void, Free> memory;
    thread_local size_t size = 0;
    const size_t needed = static_cast<size_t>(panel_rows_) * row_bytes();
    if (size < needed) {
        memory.reset(std::aligned_alloc(64, (needed + 63) / 64 * 64));
        size = memory ? needed : 0;
    }
    if (memory)
        compute(first, end, memory.get());
    return memory.get();
}

} // namespace optfuse
