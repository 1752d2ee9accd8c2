/* SPDX-License-Identifier: BSD-3-Clause */
/* norm.h: 2-norms of float32 arrays with the bits of PyTorch's vector_norm
 * (docs/numerics.md), of numbers multiplied by two factors first
 * as scale.h does, and whether all numbers were finite: one pass that reads.
 * And the largest magnitude of an array of any of our dtypes, which is the infinity-norm.
 */
#ifndef OPTFUSE_NORM_H
#define OPTFUSE_NORM_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The running sums of an order: at least so many, and at most. */
#ifdef __aarch64__
enum { OF_NORM_LANES = 4 };
#else
enum { OF_NORM_LANES = 8 };
#endif
enum { OF_NORM_SUMS = 8 };

typedef struct of_norm {
    const float *data;
    size_t n;
    double factors[2];
    float norm;  /* out */
    bool finite; /* out: before the factors */
    float *sums; /* NULL; or the running sums, OF_NORM_SUMS zeros at first, of more than one number
                    that come in parts, all but the last of whole vectors */
} of_norm;

/* Norms of several arrays. Each sum is a chain of additions that wait for each other, so that
 * four arrays at a time take little longer than one. */
typedef void of_norm_fn(of_norm *const norms[], size_t n);

/* The orders in which PyTorch sums on the processor that the build is for: those of its kernels
 * for AVX2, or for NEON and SVE vectors of 16 and 32 bytes. */
extern const char *const of_norm_orders[]; /* names, ended by NULL */

/* The best of this order whose ISA is at most `isa`. All of an order give the same bits. */
of_norm_fn *of_norm_find(size_t order, of_isa isa);

/* The largest magnitude of n numbers of 2, 4 or 8 bytes each, or a NaN if one is there, as such a
 * number, at *to; 0 of none. `from` may be `to`. */
typedef void of_largest_fn(void *to, const void *from, size_t n, size_t bytes);
of_largest_fn *of_largest_find(of_isa isa);

#ifdef __cplusplus
}
#endif
#endif
