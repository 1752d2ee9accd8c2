/* SPDX-License-Identifier: BSD-3-Clause */
/* moves.h: an update's bytes and nothing else. */
#ifndef OPTFUSE_MOVES_H
#define OPTFUSE_MOVES_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Reads the cache lines [begin, end) of all arrays and writes those of the parameter and
 * of n_state arrays, 0 to 2, as they were; the parameter past the caches if so told, as
 * are the rules' kernels. The parameter begins with a cache line. */
void moves(const void *gradient, void *param, void *const *state, size_t n_state, size_t begin,
           size_t end, bool past_caches);

/* Bits of the gradient by an exclusive or with which they are written: 0, and the compiler
 * doesn't know it. A test sets others, to see that all is read and written. */
__attribute__((visibility("default"))) extern volatile int moves_mix;

#ifdef __cplusplus
}
#endif
#endif
