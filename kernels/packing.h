/* SPDX-License-Identifier: BSD-3-Clause */
/* packing.h: symmetric matrices as their upper triangles. K-FAC keeps its factors so, and sends
 * them so between processes: half the bytes, and what is unpacked is exactly symmetric.
 *
 * A d x d matrix is packed row by row from its diagonal on: (0, 0) to (0, d-1), (1, 1) to
 * (1, d-1), and so on, d(d+1)/2 elements without gaps. A matrix that is not packed has its rows
 * ld >= d elements apart; what lies between them is neither read nor written.
 *
 * Numbers are rounded to the element type first, then each product and each sum is: no
 * multiply-adds are fused. All rows of one dtype give the same bits, but for those of NaNs. Arrays
 * need no alignment beyond that of one element, and do not overlap. */
#ifndef OPTFUSE_PACKING_H
#define OPTFUSE_PACKING_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* packed += scale * matrix, of which only the upper triangle is read. */
typedef void of_packing_add_fn(void *packed, const void *matrix, size_t d, size_t ld, double scale);

/* running = decay * running + weight * sums, n elements. */
typedef void of_packing_merge_fn(void *running, const void *sums, size_t n, double decay,
                                 double weight);

/* matrix = packed, both halves of it, with damping added to its diagonal. */
typedef void of_packing_unpack_fn(void *matrix, const void *packed, size_t d, size_t ld,
                                  double damping);

typedef struct of_packing_row {
    of_dtype dtype;
    of_isa isa;
    of_packing_add_fn *add;
    of_packing_merge_fn *merge;
    of_packing_unpack_fn *unpack;
} of_packing_row;

/* Rows for float32 and float64; ended by a row whose add is NULL. */
extern const of_packing_row of_packing_rows[];

/* The best row whose ISA is at most `isa`; NULL for 16-bit types, in which sums of products lose
 * too much. */
const of_packing_row *of_packing_find(of_dtype dtype, of_isa isa);

static inline size_t of_packed_elements(size_t d) {
    return d % 2 ? (d + 1) / 2 * d : d / 2 * (d + 1);
}

#ifdef __cplusplus
}
#endif
#endif
