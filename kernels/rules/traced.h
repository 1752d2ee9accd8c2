/* SPDX-License-Identifier: BSD-3-Clause */
/* traced.h: the rule of updates that run programs (program.h). Its state and options are those
 * of any class: which state tensors there are says the program of each update. */
#ifndef OPTFUSE_RULES_TRACED_H
#define OPTFUSE_RULES_TRACED_H

#include "../program.h"
#include "lists.h"

#define TRACED_STATE(X)                                                                            \
    X(traced, 1)                                                                                   \
    X(traced, 2) X(traced, 3) X(traced, 4) X(traced, 5) X(traced, 6) X(traced, 7) X(traced, 8)
#define TRACED_OPTIONS(X)
#define TRACED_COUNTERS(X)
/* On a GPU there is room for all state; which of it is used is the program's affair. */
#define TRACED_SETS(X, ...) X(__VA_ARGS__, 255)
OF_ENUMERATE(TRACED);

typedef struct traced_scalars {
    const of_program *program;
} traced_scalars;

#endif
