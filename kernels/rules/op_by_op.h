/* SPDX-License-Identifier: BSD-3-Clause */
/* op_by_op.h: what the rules have in common whose reference is PyTorch's operators,
 * one after the other: what becomes of the gradient before anything else. */
#ifndef OPTFUSE_RULES_OP_BY_OP_H
#define OPTFUSE_RULES_OP_BY_OP_H

/* The operators of PyTorch's CUDA, or of its CPU. */
#ifdef OF_ATEN_CUDA
#include "aten_cuda.h"
#else
#include "aten.h"
#endif

/* The first member of each such rule's scalars. Without padding, because scalars
 * are compared by their bytes. */
typedef struct op_by_op_scalars {
    double weight_decay; /* 0: none, or the rule's own affair */
    unsigned maximize;
    unsigned variant;
} op_by_op_scalars;

static inline op_by_op_scalars op_by_op_prepare(double weight_decay, double maximize, unsigned variant) {
    const op_by_op_scalars s = {weight_decay, maximize != 0.0, variant};
    return s;
}

/* A number of the optimizer's state as it is kept. (volatile: GCC 12.2 loses the
 * two conversions where it stores two such numbers side by side.) */
static inline double op_by_op_number(bool is_single, double value) {
    const volatile float single = (float)value;
    return is_single ? (double)single : value;
}

#endif
