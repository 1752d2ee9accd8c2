/* SPDX-License-Identifier: BSD-3-Clause */
/* isas.h: what is written only where the build has kernels for an instruction set, which the
 * processor it is for and its option widest_isa say: OF_AVX2(row of AVX2). The first two,
 * plain C and the baseline, every build has. */
#ifndef OF_ISAS_H
#define OF_ISAS_H

#ifdef OF_HAS_AVX2
#define OF_AVX2(...) __VA_ARGS__
#else
#define OF_AVX2(...)
#endif

#ifdef OF_HAS_AVX512
#define OF_AVX512(...) __VA_ARGS__
#else
#define OF_AVX512(...)
#endif

#ifdef OF_HAS_SVE
#define OF_SVE(...) __VA_ARGS__
#else
#define OF_SVE(...)
#endif

#endif
