// SPDX-License-Identifier: BSD-3-Clause
// blas.cpp: cuBLAS of the played device, and those functions of PyTorch's CUDA part
// that optfuse asks for it; in a library of that one's name. It multiplies by the CPU's
// operators, as the played aten::mm and aten::addmm do, and thus with their bits.
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mm.h>

#include <array>
#include <cstring>

#include "device.h"

#define FAKE_API extern "C" __attribute__((visibility("default")))

namespace {

enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { DEFAULT_MATH = 0, TF32_MATH = 3 };
enum { BFLOAT16 = 14, COMPUTE_32F = 68, DEFAULT_TENSOR_OP = 99 };

// PyTorch's, one for each thread and device.
struct Handle {
    c10::DeviceIndex device;
    fake::StreamNumber stream;
    int math_mode;
};
thread_local std::array<Handle, fake::DEVICES> handles;

// Switches of the tests; from one thread.
bool flips = false, reorders = false, tunes = false;
int failure = SUCCESS;

// A matrix as cuBLAS has it: by columns, or by rows if transposed.
struct Matrix {
    void *at;
    int64_t rows, columns, stride;
    bool transposed;

    bool is_sound() const { return stride >= (transposed ? columns : rows) && stride > 0; }
    at::Tensor transpose() const { // row-major, as its owner has it
        const std::array<int64_t, 2> strides =
            transposed ? std::array<int64_t, 2>{1, stride} : std::array<int64_t, 2>{stride, 1};
        return at::from_blob(at, {columns, rows}, strides, at::kBFloat16);
    }
    fake::Range range(bool write) const {
        const int64_t lines = transposed ? rows : columns, length = transposed ? columns : rows;
        return {at, static_cast<size_t>((lines - 1) * stride + length) * 2, write};
    }
};

// In another order of summation.
at::Tensor reordered(const at::Tensor &a, const at::Tensor &b, const at::Tensor &c, float alpha,
                     float beta) {
    const int64_t half = a.size(1) / 2, rest = a.size(1) - half;
    const auto part = [&](int64_t start, int64_t n) {
        return at::mm(a.narrow(1, start, n).to(at::kFloat), b.narrow(0, start, n).to(at::kFloat));
    };
    const at::Tensor sum = (part(half, rest) + part(0, half)) * alpha;
    return (beta == 0 ? sum : sum + c.to(at::kFloat) * beta).to(at::kBFloat16);
}

// c^T = b^T a^T is what PyTorch's operators compute, all of it row-major.
void multiply(float alpha, const Matrix &a, const Matrix &b, float beta, const Matrix &c) {
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    const at::Tensor out = c.transpose(), left = b.transpose(), right = a.transpose();
    const at::Tensor result = reorders ? reordered(left, right, out, alpha, beta)
                              : alpha == 1 && beta == 0
                                  ? at::mm(left, right)
                                  : at::addmm(out.clone(), left, right, beta, alpha);
    out.copy_(result);
    if (flips)
        *static_cast<uint16_t *>(c.at) ^= 1;
}

} // namespace

namespace at::cuda::tunable {

class __attribute__((visibility("default"))) TuningContext {
  public:
    bool IsTunableOpEnabled() const;
};
bool TuningContext::IsTunableOpEnabled() const {
    return tunes;
}

__attribute__((visibility("default"))) TuningContext *getTuningContext();
TuningContext *getTuningContext() {
    static TuningContext context;
    return &context;
}

} // namespace at::cuda::tunable

FAKE_API int32_t torch_get_current_cuda_blas_handle(void **out) {
    const c10::DeviceIndex device = fake::current_device();
    Handle &handle = handles.at(static_cast<size_t>(device));
    handle = {device, fake::current_stream(device), TF32_MATH};
    *out = &handle;
    return 0;
}

FAKE_API int cublasSetMathMode(void *handle, int mode) {
    static_cast<Handle *>(handle)->math_mode = mode;
    return SUCCESS;
}

FAKE_API int cublasGemmEx(void *of, int op_a, int op_b, int m, int n, int k, const void *alpha,
                          const void *a, int type_a, int lda, const void *b, int type_b, int ldb,
                          const void *beta, void *c, int type_c, int ldc, int compute_type,
                          int algorithm) {
    const Handle *handle = static_cast<Handle *>(of);
    const auto scalar = [](const void *at) { return *static_cast<const float *>(at); };
    const Matrix left{const_cast<void *>(a), m, k, lda, op_a != 0};
    const Matrix right{const_cast<void *>(b), k, n, ldb, op_b != 0};
    const Matrix out{c, m, n, ldc, false};
    if (failure != SUCCESS)
        return failure;
    if (type_a != BFLOAT16 || type_b != BFLOAT16 || type_c != BFLOAT16 ||
        compute_type != COMPUTE_32F || algorithm != DEFAULT_TENSOR_OP ||
        handle->math_mode != DEFAULT_MATH)
        return NOT_SUPPORTED;
    if (!left.is_sound() || !right.is_sound() || !out.is_sound())
        return INVALID_VALUE;
    multiply(scalar(alpha), left, right, scalar(beta), out);
    std::vector<fake::Range> ranges = {left.range(false), right.range(false), out.range(true)};
    fake::launch(handle->stream, "cublasGemmEx", ranges);
    return SUCCESS;
}

// These are not played.
FAKE_API int cublasSgemm_v2() {
    return NOT_SUPPORTED;
}
FAKE_API int cublasDgemm_v2() {
    return NOT_SUPPORTED;
}

FAKE_API const char *cublasGetStatusString(int status) {
    return status == 13 ? "CUBLAS_STATUS_EXECUTION_FAILED" : "another status";
}

// The last bit of the first element of each product is the other one.
FAKE_API void fake_blas_flip(bool yes) {
    flips = yes;
}
// They are summed up in another order.
FAKE_API void fake_blas_reorder(bool yes) {
    reorders = yes;
}
FAKE_API void fake_blas_tune(bool yes) {
    tunes = yes;
}
FAKE_API void fake_blas_fail(int status) {
    failure = status;
}
