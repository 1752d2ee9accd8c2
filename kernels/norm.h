/* SPDX-License-Identifier: BSD-3-Clause */
/* norm.h: 2-norms of float32 arrays with the bits of PyTorch's vector_norm
 * (docs/numerics.md), of numbers multiplied by two factors first
 * as scale.h does, and whether all numbers were finite: one pass that reads.
 * And of arrays of any of our dtypes the sums of which other norms are made, and the largest
 * magnitude, which is the infinity-norm.
 */
#ifndef OPTFUSE_NORM_H
#define OPTFUSE_NORM_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct of_norm {
    const float *data;
    size_t n;
    double factors[2];
    float norm;  /* out */
    bool finite; /* out: before the factors */
} of_norm;

/* Norms of several arrays. Each sum is a chain of additions that wait for each other, so that
 * four arrays at a time take little longer than one. */
typedef void of_norm_fn(of_norm *const norms[], size_t n);

/* The orders in which PyTorch sums on the processor that the build is for: those of its kernels
 * for AVX2, or for NEON and SVE vectors of 16 and 32 bytes. */
extern const char *const of_norm_orders[]; /* names, ended by NULL */

/* The best of this order whose ISA is at most `isa`. All of an order give the same bits. */
of_norm_fn *of_norm_find(size_t order, of_isa isa);

/* The terms of a sum: the 1-norm is the sum of magnitudes, the 2-norm the root of that of squares. */
typedef enum of_terms { OF_MAGNITUDES, OF_SQUARES, OF_TERMS_COUNT } of_terms;

typedef struct of_sum {
    const void *numbers;
    size_t n;
    double sum; /* out: a number of the type of the computation */
} of_sum;

/* Sums of several arrays of one dtype, in the order of PyTorch's kernels for AVX2 (sums.c).
 * rounded_by: what does not fill a vector; so many squares at a time are rounded before they are
 * added, and the others not; 0: none. All rows of a dtype give the same bits. */
typedef void of_sum_fn(of_sum *const sums[], size_t n, of_terms terms, size_t rounded_by);
of_sum_fn *of_sum_find(of_dtype dtype, of_isa isa); /* the best one that `isa` runs */

/* The largest magnitude of n numbers of 2, 4 or 8 bytes each, or a NaN if one is there, as such a
 * number, at *to; 0 of none. `from` may be `to`. */
typedef void of_largest_fn(void *to, const void *from, size_t n, size_t bytes);
of_largest_fn *of_largest_find(of_isa isa);

#ifdef __cplusplus
}
#endif
#endif
