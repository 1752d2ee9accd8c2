/* SPDX-License-Identifier: BSD-3-Clause */
/* random_program.h: programs of any operators, for the kernels that run them. */
#ifndef OPTFUSE_TEST_RANDOM_PROGRAM_H
#define OPTFUSE_TEST_RANDOM_PROGRAM_H

#include <stdint.h>

#include "program.h"

enum { MOST_INSTRUCTIONS = 56 };

/* Over what is in memory and temporaries that were written; code has room for MOST_INSTRUCTIONS.
 * With all state it uses the first n_registers, with less as many temporaries more. A quarter of
 * the programs is short and takes any registers. In the others every value counts: it is read, or is
 * in memory at the end, so that a wrong one is seen. keeps_gradient: the program does not write
 * the gradient. */
of_program random_program(of_instruction *code, bool keeps_gradient, unsigned n_registers,
                          uint64_t *random);

#endif
