/* SPDX-License-Identifier: BSD-3-Clause */
/* blas.c: row-major products by cuBLAS, which counts by columns. What one calls
 * rows the other calls columns, so that a row-major c = a b is computed as
 * c^T = b^T a^T with the operands changed over and nothing moved. */
#include "matrix/blas.h"

#include <inttypes.h>
#include <limits.h>

#include "matrix/blas_find.h"
#include "optfuse.h"

/* A call of cuBLAS, in its own order: the first factor is our b. */
typedef struct call {
    void *handle;
    int op[2], ld[3], m, n, k;
    const void *first, *second;
    void *out;
    double alpha, beta;
} call;

static int64_t rows_of(const of_matrix *x) {
    return x->transposed ? x->columns : x->rows;
}
static int64_t columns_of(const of_matrix *x) {
    return x->transposed ? x->rows : x->columns;
}

static bool is_sound(const char *name, const of_matrix *x) {
    if (x->rows < 0 || x->columns < 0 || x->stride < x->columns) {
        of_set_error("matrix %s of %" PRId64 " x %" PRId64 " can't have rows %" PRId64
                     " elements apart",
                     name, x->rows, x->columns, x->stride);
        return false;
    }
    if (x->rows > INT_MAX || x->columns > INT_MAX || x->stride > INT_MAX) {
        of_set_error("matrix %s of %" PRId64 " x %" PRId64 " is too large for cuBLAS", name,
                     x->rows, x->columns);
        return false;
    }
    return true;
}

static bool fits(const of_matrix *a, const of_matrix *b, const of_matrix *c) {
    if (!is_sound("a", a) || !is_sound("b", b) || !is_sound("c", c))
        return false;
    if (c->transposed) {
        of_set_error("the result of a matrix product can't be a transposed matrix");
        return false;
    }
    if (columns_of(a) != rows_of(b) || rows_of(a) != c->rows || columns_of(b) != c->columns) {
        of_set_error("a product of %" PRId64 " x %" PRId64 " and %" PRId64 " x %" PRId64
                     " is not %" PRId64 " x %" PRId64,
                     rows_of(a), columns_of(a), rows_of(b), columns_of(b), c->rows, c->columns);
        return false;
    }
    return true;
}

/* cuBLAS wants a distance of at least one, even between rows that do not exist. */
static int distance(const of_matrix *x) {
    return x->stride > 0 ? (int)x->stride : 1;
}

static call call_of(double alpha, const of_matrix *a, const of_matrix *b, double beta,
                    const of_matrix *c) {
    call out = {
        .op = {b->transposed ? OF_CUBLAS_T : OF_CUBLAS_N,
               a->transposed ? OF_CUBLAS_T : OF_CUBLAS_N},
        .ld = {distance(b), distance(a), distance(c)},
        .m = (int)c->columns,
        .n = (int)c->rows,
        .k = (int)columns_of(a),
        .first = b->at,
        .second = a->at,
        .out = c->at,
        .alpha = alpha,
        .beta = beta,
    };
    return out;
}

static of_cublas_status run_float(const of_blas *blas, const call *x) {
    const float alpha = (float)x->alpha, beta = (float)x->beta;
    return blas->sgemm(x->handle, x->op[0], x->op[1], x->m, x->n, x->k, &alpha, x->first, x->ld[0],
                       x->second, x->ld[1], &beta, x->out, x->ld[2]);
}

static of_cublas_status run_double(const of_blas *blas, const call *x) {
    return blas->dgemm(x->handle, x->op[0], x->op[1], x->m, x->n, x->k, &x->alpha, x->first,
                       x->ld[0], x->second, x->ld[1], &x->beta, x->out, x->ld[2]);
}

static of_cublas_status run_half(const of_blas *blas, const call *x, int type) {
    const float alpha = (float)x->alpha, beta = (float)x->beta;
    const of_cublas_status status = blas->set_math_mode(x->handle, OF_CUBLAS_DEFAULT_MATH);
    if (status != 0)
        return status;
    return blas->gemm_ex(x->handle, x->op[0], x->op[1], x->m, x->n, x->k, &alpha, x->first, type,
                         x->ld[0], x->second, type, x->ld[1], &beta, x->out, type, x->ld[2],
                         OF_CUBLAS_COMPUTE_32F, OF_CUBLAS_GEMM_DEFAULT_TENSOR_OP);
}

static of_cublas_status run(const of_blas *blas, of_dtype dtype, const call *x) {
    switch (dtype) {
    case OF_FLOAT32:
        return run_float(blas, x);
    case OF_FLOAT64:
        return run_double(blas, x);
    default:
        return run_half(blas, x, dtype == OF_BFLOAT16 ? OF_CUDA_R_16BF : OF_CUDA_R_16F);
    }
}

bool of_blas_product(of_dtype dtype, double alpha, const of_matrix *a, const of_matrix *b,
                     double beta, const of_matrix *c) {
    if (!fits(a, b, c))
        return false;
    if (c->rows == 0 || c->columns == 0)
        return true;
    const of_blas *blas = of_blas_find();
    if (!blas)
        return false;
    call x = call_of(alpha, a, b, beta, c);
    if (blas->handle(&x.handle) != 0) {
        of_set_error("PyTorch could not give its cuBLAS handle for the current device");
        return false;
    }
    const of_cublas_status status = run(blas, dtype, &x);
    if (status != 0)
        of_set_error("cuBLAS could not multiply %" PRId64 " x %" PRId64 " by %" PRId64 " x %" PRId64
                     " (%s): %s",
                     rows_of(a), columns_of(a), rows_of(b), columns_of(b), of_dtype_name(dtype),
                     blas->status_string(status));
    return status == 0;
}

bool of_blas_is_untuned(void) {
    const of_blas *blas = of_blas_find();
    if (!blas)
        return false;
    const bool tuned = blas->is_tuning(blas->tuning());
    if (tuned)
        of_set_error("PyTorch's TunableOp chooses matrix products");
    return !tuned;
}
