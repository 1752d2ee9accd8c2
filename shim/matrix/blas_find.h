/* SPDX-License-Identifier: BSD-3-Clause */
/* blas_find.h: the functions of cuBLAS that are used, with the types of its C
 * interface spelled out; they are the same in CUDA 12 and 13. */
#ifndef OPTFUSE_SHIM_BLAS_FIND_H
#define OPTFUSE_SHIM_BLAS_FIND_H

#include <stdbool.h>
#include <stdint.h>

typedef int of_cublas_status; /* 0: success */
enum { OF_CUBLAS_N = 0, OF_CUBLAS_T = 1 };
enum { OF_CUDA_R_16F = 2, OF_CUDA_R_16BF = 14 };
enum { OF_CUBLAS_DEFAULT_MATH = 0 };
enum { OF_CUBLAS_COMPUTE_32F = 68, OF_CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 };

typedef struct of_blas {
    int32_t (*handle)(void **out); /* PyTorch's; 0: success */
    /* at::cuda::tunable::getTuningContext(), and IsTunableOpEnabled() of what it returns */
    void *(*tuning)(void);
    bool (*is_tuning)(const void *context);
    of_cublas_status (*set_math_mode)(void *handle, int mode);
    of_cublas_status (*sgemm)(void *handle, int op_a, int op_b, int m, int n, int k,
                              const float *alpha, const float *a, int lda, const float *b, int ldb,
                              const float *beta, float *c, int ldc);
    of_cublas_status (*dgemm)(void *handle, int op_a, int op_b, int m, int n, int k,
                              const double *alpha, const double *a, int lda, const double *b,
                              int ldb, const double *beta, double *c, int ldc);
    of_cublas_status (*gemm_ex)(void *handle, int op_a, int op_b, int m, int n, int k,
                                const void *alpha, const void *a, int type_a, int lda,
                                const void *b, int type_b, int ldb, const void *beta, void *c,
                                int type_c, int ldc, int compute_type, int algorithm);
    const char *(*status_string)(of_cublas_status status);
} of_blas;

/* The functions, or NULL and the thread's error is set; then the next call
 * looks again, because PyTorch may load its CUDA part later. */
const of_blas *of_blas_find(void);

#endif
