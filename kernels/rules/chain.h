/* SPDX-License-Identifier: BSD-3-Clause */
/* chain.h: what all rules have in common whose reference is a chain of PyTorch's
 * operators: what becomes of the gradient before anything else. */
#ifndef OPTFUSE_RULES_CHAIN_H
#define OPTFUSE_RULES_CHAIN_H

/* The operators of PyTorch's CUDA, or of its CPU. */
#ifdef OF_ATEN_CUDA
#include "aten_cuda.h"
#else
#include "aten.h"
#endif

/* The first member of each such rule's scalars. Without padding, because scalars
 * are compared by their bytes. */
typedef struct chain_scalars {
    double weight_decay; /* 0: none, or the rule's own affair */
    unsigned maximize;
    unsigned variant;
} chain_scalars;

static inline chain_scalars chain_prepare(double weight_decay, double maximize, unsigned variant) {
    const chain_scalars s = {weight_decay, maximize != 0.0, variant};
    return s;
}

/* A number of the optimizer's state as it is kept. (volatile: GCC 12.2 loses the
 * two conversions where it stores two such numbers side by side.) */
static inline double chain_number(bool is_single, double value) {
    const volatile float single = (float)value;
    return is_single ? (double)single : value;
}

#endif
