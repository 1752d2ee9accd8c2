/* SPDX-License-Identifier: BSD-3-Clause */
/* program_element.h: the operators of programs (operators.def) as PyTorch's CUDA computes them.
 * In C and on the GPU. */
#ifndef OPTFUSE_CUDA_PROGRAM_ELEMENT_H
#define OPTFUSE_CUDA_PROGRAM_ELEMENT_H

#include "../cpu/stored.h"

#include "../rules/aten_cuda.h"

#include OF_RULE_HEADER

#ifdef __CUDACC__
#define OF_EACH_LANE _Pragma("unroll") for (int lane = 0; lane < n; lane++)
#else
#define OF_EACH_LANE for (int lane = 0; lane < n; lane++)
#endif

/* An operator on n elements; on a GPU n is a constant, and all threads of a block take one
 * operation. */
#define OF_OPERATOR(name, inputs, result)                                                          \
    case OF_OPERATOR_##name:                                                                       \
        OF_EACH_LANE {                                                                             \
            const of_real a = from_a[lane], b = from_b[lane], c = from_c[lane];                    \
            (void)a, (void)b, (void)c;                                                             \
            to[lane] = result;                                                                     \
        }                                                                                          \
        break;

OF_RULE_FN void of_operate(unsigned operation, int n, of_real *to, const of_real *from_a,
                           const of_real *from_b, const of_real *from_c, of_real s, of_real t) {
    const of_form form = {true, false};
    switch (operation) {
#include "../operators.def"
    default:
        break;
    }
}

#endif
