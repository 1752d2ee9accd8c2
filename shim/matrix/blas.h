/* SPDX-License-Identifier: BSD-3-Clause */
/* blas.h: matrix products on a GPU, by the cuBLAS that PyTorch has loaded and on
 * PyTorch's own handle, with its current stream and workspace. Pure C; it is
 * found at the first call and nothing of CUDA is needed to build it. */
#ifndef OPTFUSE_SHIM_BLAS_H
#define OPTFUSE_SHIM_BLAS_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A matrix in device memory, row by row. `transposed`: the product takes the
 * transpose of what is described here; not for a result. */
typedef struct of_matrix {
    void *at;
    int64_t rows;
    int64_t columns;
    int64_t stride; /* elements from one row to the next, at least `columns` */
    bool transposed;
} of_matrix;

/* c = alpha * a * b + beta * c, all of `dtype`, accumulated in float (float64:
 * double). With beta 0, c is not read. c overlaps neither a nor b; a and b may
 * be the same memory. Float and double are multiplied in PyTorch's math mode, and
 * 16 bits in the default one, which PyTorch sets around its own such products too
 * (while it allows their reductions in reduced precision) and leaves behind. Runs
 * on the current stream of the calling thread's current device, which the caller
 * has set (PyTorch's guards), and does not wait for it. False, and
 * of_error_message() says why, if it was not launched. */
bool of_blas_product(of_dtype dtype, double alpha, const of_matrix *a, const of_matrix *b,
                     double beta, const of_matrix *c);

/* Whether PyTorch's own products of 16 bits are these very calls of cuBLAS, as far
 * as its tuning (TunableOp) goes, which may choose others. False, and
 * of_error_message() says why: it is on, or can't be asked. */
bool of_blas_is_untuned(void);

#ifdef __cplusplus
}
#endif
#endif
