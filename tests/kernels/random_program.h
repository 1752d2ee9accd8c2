/* SPDX-License-Identifier: BSD-3-Clause */
/* random_program.h: programs of any operators, for the kernels that run them. */
#ifndef OPTFUSE_TEST_RANDOM_PROGRAM_H
#define OPTFUSE_TEST_RANDOM_PROGRAM_H

#include <stdint.h>

#include "program.h"

enum { MOST_INSTRUCTIONS = 12 };

/* Over what is in memory and temporaries that were written, in the first n_registers; code has
 * room for MOST_INSTRUCTIONS. keeps_gradient: it does not write the gradient. */
of_program random_program(of_instruction *code, bool keeps_gradient, unsigned n_registers,
                          uint64_t *random);

#endif
