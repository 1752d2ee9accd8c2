/* SPDX-License-Identifier: BSD-3-Clause */
/* norm.h: 2-norms of float32 arrays with the bits of PyTorch's vector_norm on
 * CPUs with AVX2 (docs/numerics.md), of numbers multiplied by two factors first
 * as scale.h does, and whether all numbers were finite: one pass that reads.
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

/* The best whose ISA is at most `isa`. All give the same bits. */
of_norm_fn *of_norm_find(of_isa isa);

#ifdef __cplusplus
}
#endif
#endif
