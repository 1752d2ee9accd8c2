/* SPDX-License-Identifier: BSD-3-Clause */
/* op_by_op_instance.h: what one compilation of op_by_op_loop.c is for. The build
 * defines
 *
 *   OF_RULE, OF_RULE_HEADER, OF_VARIANTS   rmsprop, "../rules/rmsprop.h", RMSPROP_VARIANTS
 *   OF_N_STATE                             RMSPROP_N_STATE
 *   OF_ROOTS                               RMSPROP_ROOTS: how many square roots it takes
 *   OF_DTYPE                               float32, and OF_DTYPE_FLOAT32
 *   OF_ISA                                 avx2
 *   OF_REFERENCE, OF_FUSED                 fused, true: the one that occurs there
 *
 * A rule has <rule>_radicand(), which says of what they are taken, if any, and
 * <rule>_element(), which gets them and does the rest.
 */
#ifndef OPTFUSE_CPU_OP_BY_OP_INSTANCE_H
#define OPTFUSE_CPU_OP_BY_OP_INSTANCE_H

#include "narrow.h"
#include "stored.h"

#include OF_RULE_HEADER

typedef OF_RULE_NAME(scalars) of_scalars;

of_kernel_fn OF_KERNEL_NAME(fused);
of_kernel_fn OF_KERNEL_NAME(plain);

/* Square roots as the reference takes them: those of 16-bit numbers are
 * correctly rounded, the others come from its library. Room for one at least,
 * because C has no empty arrays. */
enum { OF_ROOM = OF_ROOTS > 0 ? OF_ROOTS : 1 };

static inline void of_take_roots(const of_span *span, of_real *roots, size_t n) {
    if (!OF_NARROW && span->square_roots) {
        span->square_roots(roots, n);
        return;
    }
    for (size_t i = 0; i < n; i++)
        roots[i] = aten_round(of_square_root(roots[i]));
}

#endif
