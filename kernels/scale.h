/* SPDX-License-Identifier: BSD-3-Clause */
/* scale.h: multiplies numbers by two factors, as clipping and unscaling do with
 * gradients: by the first, rounded to the element type, then by the second,
 * rounded again. A factor of 1 changes nothing.
 *
 * Rows as those of the update kernels: all of one dtype give the same bits. The
 * GPU's kernels take a factor that is on the device instead (rules/scaling.h).
 */
#ifndef OPTFUSE_SCALE_H
#define OPTFUSE_SCALE_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { OF_MAX_FACTORS = 2 };

/* n elements; to and from are the same array or don't overlap. Factors are
 * rounded to the type of the computation: float for float32 and the 16-bit
 * types, double for float64. */
typedef void of_scale_fn(void *to, const void *from, size_t n,
                         const double factors[OF_MAX_FACTORS]);

typedef struct of_scale_row {
    of_dtype dtype;
    of_isa isa;
    of_scale_fn *run;
} of_scale_row;

/* Ended by a row whose run is NULL. */
extern const of_scale_row of_scale_rows[];

/* The best row whose ISA is at most `isa`; never NULL. */
of_scale_fn *of_scale_find(of_dtype dtype, of_isa isa);

#ifdef __cplusplus
}
#endif
#endif
