/* SPDX-License-Identifier: BSD-3-Clause */
/* real.h: the number type a rule computes in, chosen by whoever includes it.
 *
 * Define OF_REAL_FLOAT to compute in float (float32, bfloat16, float16), else
 * the rules compute in double. Rules are written with these names only, so
 * that one text compiles as C11 and as CUDA C++.
 */
#ifndef OPTFUSE_RULES_REAL_H
#define OPTFUSE_RULES_REAL_H

#include <math.h>
#include <stdbool.h>

#ifdef __FAST_MATH__
#error "-ffast-math changes the bits: build without it"
#endif

#include "../kernels.h"
#include "lists.h"

#ifdef OF_REAL_FLOAT
typedef float of_real;
#else
typedef double of_real;
#endif

#ifdef __CUDACC__
#define OF_RULE_FN __host__ __device__ static __forceinline__
#elif defined(__GNUC__)
#define OF_RULE_FN static inline __attribute__((always_inline, unused))
#else
#define OF_RULE_FN static inline
#endif

/* One element of a parameter and what belongs to it. */
typedef struct of_element {
    of_real param;
    of_real grad;
    of_real state[OF_FORMULA_STATE];
} of_element;

/* The code of the reference that an element takes. Always a constant where it
 * matters, so that no branch is left in the loop. */
typedef struct of_form {
    bool fused; /* products and sums contracted as on CPUs with an FMA unit */
    bool tail;  /* the reference's scalar code for the last elements */
} of_form;

/* On AArch64 scalar code is always contracted. Vectors of SVE are not, since their products and
 * sums are calls of functions; that is the reference OF_REF_CPU_FUSED_PLAIN there. */
#if defined(__aarch64__)
enum { OF_SCALARS_FUSE = true };
#else
enum { OF_SCALARS_FUSE = false };
#endif
#define OF_BODY(fused) {(fused), false}
#define OF_TAIL(fused) {(fused) || OF_SCALARS_FUSE, true}

/* Whether a multiply-add that PyTorch's source spells out is fused, and what is computed once for
 * all elements. */
OF_RULE_FN bool of_fuses_spelled(of_form form) {
    return form.fused || OF_SCALARS_FUSE;
}

/* The numbers of an update on a GPU beside its options. */
typedef struct of_step_scalars {
    of_real lr;
    of_real correction1; /* 1 - beta1^t */
    of_real correction2; /* sqrt(1 - beta2^t) */
    bool first;          /* the first update of the parameter */
    bool scaled;         /* a gradient scale is given */
    bool narrow;         /* elements have 16 bits */
    bool early;          /* the reference rounds as on the chips before capability 10 */
} of_step_scalars;

/* A number that comes as double, in the type of the computation. On a GPU it is converted
 * where this is called: to save a register the compiler would do it at every element,
 * and GPUs are slow at double. */
OF_RULE_FN of_real of_rounded(double number) {
    of_real rounded = (of_real)number;
#if defined(__CUDA_ARCH__) && defined(OF_REAL_FLOAT)
    asm volatile("" : "+f"(rounded));
#endif
    return rounded;
}

/* a * b + c, rounded once if fused and twice if not. */
OF_RULE_FN of_real of_multiply_add(bool fused, of_real a, of_real b, of_real c) {
#if defined(__CUDA_ARCH__) && defined(OF_STATE_BFLOAT16) /* compiled with contraction */
    return fused ? fmaf(a, b, c) : __fadd_rn(__fmul_rn(a, b), c);
#elif defined(OF_REAL_FLOAT)
    return fused ? fmaf(a, b, c) : a * b + c;
#else
    return fused ? fma(a, b, c) : a * b + c;
#endif
}

/* x / by, correctly rounded, where reciprocal is 1 / by, correctly rounded: one
 * product and two fused multiply-adds instead of a division (P. Markstein, IBM J.
 * Res. Dev. 34, 1990). Nothing may overflow or underflow on the way, as when x is
 * 0 or the square root of a number and by lies between 1e-8 and 1. The correction
 * is left out where it is 0, or NaN because x or the quotient is infinite.
 * OF_AS_ON_GPU: for tests that run a GPU's code on a CPU. */
OF_RULE_FN of_real of_divide_known(of_real x, of_real by, of_real reciprocal) {
#if defined(__FMA__) || defined(__CUDA_ARCH__) || defined(OF_AS_ON_GPU)
    const of_real quotient = x * reciprocal;
    const of_real rest = of_multiply_add(true, -quotient, by, x);
    const of_real corrected = of_multiply_add(true, rest, reciprocal, quotient);
    return rest < (of_real)0 || rest > (of_real)0 ? corrected : quotient;
#else
    (void)reciprocal;
    return x / by;
#endif
}

OF_RULE_FN of_real of_square_root(of_real x) {
#ifdef OF_REAL_FLOAT
    return sqrtf(x);
#else
    return sqrt(x);
#endif
}

OF_RULE_FN of_real of_absolute(of_real x) {
#ifdef OF_REAL_FLOAT
    return fabsf(x);
#else
    return fabs(x);
#endif
}

#endif
