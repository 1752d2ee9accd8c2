/* SPDX-License-Identifier: BSD-3-Clause */
/* fake_cublas.c: cuBLAS on the CPU, written from its documentation: column by
 * column, as its callers must see it. Built several times over, under the names
 * of several releases. FAKE_ID says which one was called. */
#include "fake.h"

#include <stdlib.h>
#include <string.h>

typedef union bits {
    float value;
    uint32_t word;
} bits;

static const char *failure(void) {
    return getenv("FAKE_CUBLAS_FAILS");
}

static double element(const void *matrix, int type, int64_t at) {
    bits wide = {0};
    switch (type) {
    case 0:
        return ((const float *)matrix)[at];
    case 1:
        return ((const double *)matrix)[at];
    default: /* 14, bfloat16: the upper half of a float */
        wide.word = (uint32_t)((const uint16_t *)matrix)[at] << 16;
        return (double)wide.value;
    }
}

/* The tests' numbers are small integers, exact in every type. */
static void store(void *matrix, int type, int64_t at, double value) {
    bits wide = {.value = (float)value};
    if (type == 0)
        ((float *)matrix)[at] = (float)value;
    else if (type == 1)
        ((double *)matrix)[at] = value;
    else
        ((uint16_t *)matrix)[at] = (uint16_t)(wide.word >> 16);
}

static int multiply(void *handle, int op_a, int op_b, int m, int n, int k, double alpha,
                    const void *a, int lda, const void *b, int ldb, double beta, void *c, int ldc,
                    int type) {
    if (failure())
        return atoi(failure());
    const int rows_a = op_a ? k : m, rows_b = op_b ? n : k;
    if (handle != FAKE_HANDLE || lda < (rows_a > 1 ? rows_a : 1) ||
        ldb < (rows_b > 1 ? rows_b : 1) || ldc < (m > 1 ? m : 1))
        return 7; /* CUBLAS_STATUS_INVALID_VALUE */
    for (int64_t j = 0; j < n; j++)
        for (int64_t i = 0; i < m; i++) {
            double sum = 0;
            for (int64_t l = 0; l < k; l++)
                sum += element(a, type, op_a ? l + i * lda : i + l * lda) *
                       element(b, type, op_b ? j + l * ldb : l + j * ldb);
            const double old = beta != 0 ? beta * element(c, type, i + j * ldc) : 0;
            store(c, type, i + j * ldc, alpha * sum + old);
        }
    fake_called = FAKE_ID;
    return 0;
}

FAKE_API int fake_called = 0;

enum { TF32_ALLOWED = 3 };
static int math_mode = TF32_ALLOWED;

FAKE_API int cublasSetMathMode(void *handle, int mode) {
    math_mode = mode;
    return handle == FAKE_HANDLE ? 0 : 7;
}

FAKE_API int cublasSgemm_v2(void *handle, int op_a, int op_b, int m, int n, int k,
                            const float *alpha, const float *a, int lda, const float *b, int ldb,
                            const float *beta, float *c, int ldc) {
    return multiply(handle, op_a, op_b, m, n, k, (double)*alpha, a, lda, b, ldb, (double)*beta, c,
                    ldc, 0);
}

FAKE_API int cublasDgemm_v2(void *handle, int op_a, int op_b, int m, int n, int k,
                            const double *alpha, const double *a, int lda, const double *b, int ldb,
                            const double *beta, double *c, int ldc) {
    return multiply(handle, op_a, op_b, m, n, k, *alpha, a, lda, b, ldb, *beta, c, ldc, 1);
}

FAKE_API int cublasGemmEx(void *handle, int op_a, int op_b, int m, int n, int k, const void *alpha,
                          const void *a, int type_a, int lda, const void *b, int type_b, int ldb,
                          const void *beta, void *c, int type_c, int ldc, int compute_type,
                          int algorithm) {
    if (type_a != 14 || type_b != 14 || type_c != 14 || compute_type != 68 || algorithm != 99 ||
        math_mode != 0)
        return 15;            /* CUBLAS_STATUS_NOT_SUPPORTED */
    math_mode = TF32_ALLOWED; /* PyTorch sets it whenever it gives the handle */
    return multiply(handle, op_a, op_b, m, n, k, (double)*(const float *)alpha, a, lda, b, ldb,
                    (double)*(const float *)beta, c, ldc, 14);
}

FAKE_API const char *cublasGetStatusString(int status) {
    return status == 13 ? "CUBLAS_STATUS_EXECUTION_FAILED" : "another status";
}
