/* SPDX-License-Identifier: BSD-3-Clause */
/* programs.h: the rule of updates that run programs (program.h). Its state and options are those
 * of any class: which state tensors there are says the program of each update. */
#ifndef OPTFUSE_RULES_PROGRAMS_H
#define OPTFUSE_RULES_PROGRAMS_H

#include "../program.h"
#include "lists.h"

#define PROGRAMS_STATE(X)                                                                          \
    X(programs, 1) X(programs, 2) X(programs, 3) X(programs, 4)                                    \
    X(programs, 5) X(programs, 6) X(programs, 7) X(programs, 8)
#define PROGRAMS_OPTIONS(X)
#define PROGRAMS_COUNTERS(X)
/* On a GPU there is room for all state; which of it is used is the program's affair. */
#define PROGRAMS_SETS(X, ...) X(__VA_ARGS__, 255)
OF_ENUMERATE(PROGRAMS);

typedef struct programs_scalars {
    const of_program *program;
} programs_scalars;

#endif
