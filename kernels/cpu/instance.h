/* SPDX-License-Identifier: BSD-3-Clause */
/* instance.h: what one compilation of the loop is for. The build defines
 *
 *   OF_RULE, OF_VARIANTS   adam, ADAM_VARIANTS
 *   OF_DTYPE               float32, and OF_DTYPE_FLOAT32
 *   OF_ISA                 avx2
 *
 * and gets the functions of_adam_float32_avx2_fused and ..._plain, one for
 * each reference.
 */
#ifndef OPTFUSE_CPU_INSTANCE_H
#define OPTFUSE_CPU_INSTANCE_H

#include <stdint.h>

#if !defined(OF_DTYPE_FLOAT64)
#define OF_REAL_FLOAT
#endif

#include "../rules/adam.h"
#include "../rules/sgd.h"

/* The type an element has in memory; the 16-bit ones are computed in float. */
#if defined(OF_DTYPE_FLOAT32)
typedef float of_stored;
enum { OF_NARROW = 0 };
#elif defined(OF_DTYPE_FLOAT64)
typedef double of_stored;
enum { OF_NARROW = 0 };
#elif defined(OF_DTYPE_BFLOAT16) || defined(OF_DTYPE_FLOAT16)
#define OF_IS_NARROW
typedef uint16_t of_stored;
enum { OF_NARROW = 1 };
#else
#error "define OF_DTYPE and OF_DTYPE_<NAME>"
#endif

#define OF_PASTE2(a, b) a##_##b
#define OF_PASTE(a, b) OF_PASTE2(a, b)
#define OF_RULE_NAME(name) OF_PASTE(OF_RULE, name)
#define OF_KERNEL_NAME(reference)                                                                  \
    OF_PASTE(of, OF_PASTE(OF_PASTE(OF_RULE, OF_DTYPE), OF_PASTE(OF_ISA, reference)))

typedef OF_RULE_NAME(constants) of_constants;

of_kernel_fn OF_KERNEL_NAME(fused);
of_kernel_fn OF_KERNEL_NAME(plain);

/* True if every element takes the reference's scalar code. */
#define OF_ALL_TAIL (OF_NARROW && OF_RULE_NAME(narrow_is_scalar))

#endif
