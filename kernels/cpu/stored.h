/* SPDX-License-Identifier: BSD-3-Clause */
/* stored.h: the type an element has in memory, and names made of what the build
 * defines: OF_RULE, OF_DTYPE, OF_ISA, and OF_DTYPE_<NAME>, as float32 and
 * OF_DTYPE_FLOAT32. */
#ifndef OPTFUSE_CPU_STORED_H
#define OPTFUSE_CPU_STORED_H

#include <stdint.h>

#if defined(OF_DTYPE_FLOAT32)
#define OF_REAL_FLOAT
typedef float of_stored;
enum { OF_NARROW = 0 };
#elif defined(OF_DTYPE_FLOAT64)
typedef double of_stored;
enum { OF_NARROW = 0 };
#elif defined(OF_DTYPE_BFLOAT16) || defined(OF_DTYPE_FLOAT16)
/* Computed in float. */
#define OF_IS_NARROW
#define OF_REAL_FLOAT
typedef uint16_t of_stored;
enum { OF_NARROW = 1 };
#else
#error "define OF_DTYPE and OF_DTYPE_<NAME>"
#endif

/* The state's elements are of the same type, but where the build defines OF_STATE_BFLOAT16. */
#ifdef OF_STATE_BFLOAT16
typedef uint16_t of_stored_state;
#else
typedef of_stored of_stored_state;
#endif

/* Before a loop whose arrays do not overlap. */
#if defined(__GNUC__) && !defined(__clang__)
#define OF_NO_ALIAS _Pragma("GCC ivdep")
#else
#define OF_NO_ALIAS
#endif

#define OF_PASTE2(a, b) a##_##b
#define OF_PASTE(a, b) OF_PASTE2(a, b)
#define OF_RULE_NAME(name) OF_PASTE(OF_RULE, name)
#define OF_KERNEL_NAME(reference)                                                                  \
    OF_PASTE(of, OF_PASTE(OF_PASTE(OF_RULE, OF_DTYPE), OF_PASTE(OF_ISA, reference)))

#endif
