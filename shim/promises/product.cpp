// SPDX-License-Identifier: BSD-3-Clause
// product.cpp: panels of rows by the very function of MKL, or in 16 bits of oneDNN, that at::mm()
// calls for the whole.
#include "promises/product.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>

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

at::Tensor tensor_at(void *memory, int64_t rows, int64_t columns, at::ScalarType dtype) {
    return at::from_blob(memory, {rows, columns}, at::TensorOptions(dtype));
}

void multiply_16_bits(const at::Tensor &dy, const at::Tensor &x, int64_t first, int64_t end,
                      void *out) {
    const SerialMkl alone;
    const PlainMode plain;
    mkldnn_matmul()(dy.slice(1, first, end).t(), x,
                    tensor_at(out, end - first, x.size(1), x.scalar_type()), 0, 1);
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

at::Tensor kept_copy(const at::Tensor &t) {
    const PlainMode plain;
    if (t.is_contiguous() && !OF_GUARD(factors_copied))
        return t.detach();
    return at::empty(t.sizes(), t.options().memory_format(at::MemoryFormat::Contiguous)).copy_(t);
}

// 16 bits are cast to 32 under autocast.
int64_t rows_of_panel(const at::Tensor &dy, const at::Tensor &x) {
    const int64_t element = std::max<int64_t>(static_cast<int64_t>(x.element_size()), 4);
    return optfuse::rows_of_panel(dy.size(1), x.size(1) * element);
}

struct Free {
    void operator()(void *memory) const { std::free(memory); }
};

// Memory of one thread for a panel; it grows.
class Room {
  public:
    void *of(size_t bytes) { // null: there is no memory
        if (size_ < bytes) {
            memory_.reset(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
            size_ = memory_ ? bytes : 0;
        }
        return memory_.get();
    }

  private:
    std::unique_ptr<void, Free> memory_;
    size_t size_ = 0;
};

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

int64_t rows_of_panel(int64_t rows, int64_t row_bytes) {
    const int64_t threads = thread_count();
    const int64_t least = (rows * row_bytes + kPanelBytes - 1) / kPanelBytes;
    const int64_t panels = std::max<int64_t>((least + threads - 1) / threads * threads, 1);
    const int64_t of_each = (rows + panels - 1) / panels;
    return (of_each + kRows - 1) / kRows * kRows;
}

WeightProduct::WeightProduct(int64_t rows, int64_t columns, at::ScalarType dtype,
                             int64_t panel_rows)
    : rows_(rows), columns_(columns), dtype_(dtype), panel_rows_(panel_rows),
      floating_(of_floating_now()) {}

bool WeightProduct::compute(int64_t first, int64_t end, void *out) const {
    const unsigned outside = of_floating_now();
    of_floating_set(floating_);
    const bool done = fill(first, end, out);
    of_floating_set(outside);
    return done;
}

void WeightProduct::compute_all(void *out) const {
    std::atomic<bool> done{true};
    each_panel([&](int64_t first, int64_t end) {
        if (!compute(first, end,
                     static_cast<char *>(out) + static_cast<size_t>(first) * row_bytes()))
            done = false;
    });
    if (!done)
        throw std::bad_alloc();
}

const void *WeightProduct::panel(int64_t first, int64_t end) const {
    thread_local Room room;
    void *out = room.of(static_cast<size_t>(panel_rows_) * row_bytes());
    return out != nullptr && compute(first, end, out) ? out : nullptr;
}

LinearProduct::LinearProduct(const at::Tensor &dy, const at::Tensor &x)
    : WeightProduct(dy.size(1), x.size(1), x.scalar_type(), rows_of_panel(dy, x)),
      dy_(kept_copy(dy)), x_(kept_copy(x)) {}

std::shared_ptr<const WeightProduct> LinearProduct::cast(at::ScalarType dtype) const {
    if (!is_16_bits(x_.scalar_type()))
        return nullptr;
    auto made = std::make_shared<LinearProduct>(*this);
    made->dtype_ = dtype;
    return made;
}

bool LinearProduct::fill(int64_t first, int64_t end, void *out) const {
    if (is_16_bits(x_.scalar_type()))
        return fill_16_bits(first, end, out);
    if (dtype_ == at::kFloat)
        multiply<float>(dy_, x_, first, end, out);
    else
        multiply<double>(dy_, x_, first, end, out);
    return true;
}

bool LinearProduct::fill_16_bits(int64_t first, int64_t end, void *out) const {
    try {
        if (dtype_ != x_.scalar_type())
            return fill_cast(first, end, out);
        multiply_16_bits(dy_, x_, first, end, out);
        return true;
    } catch (const std::exception &) {
        return false;
    }
}

bool LinearProduct::fill_cast(int64_t first, int64_t end, void *out) const {
    thread_local Room room;
    void *rounded = room.of(static_cast<size_t>(panel_rows_ * columns_) * x_.element_size());
    if (rounded == nullptr)
        return false;
    multiply_16_bits(dy_, x_, first, end, rounded);
    const PlainMode plain;
    tensor_at(out, end - first, columns_, dtype_)
        .copy_(tensor_at(rounded, end - first, columns_, x_.scalar_type()));
    return true;
}

} // namespace optfuse
