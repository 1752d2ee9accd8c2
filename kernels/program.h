/* SPDX-License-Identifier: BSD-3-Clause */
/* program.h: updates that are no rule of ours: a straight line of elementwise operators over
 * the parameter, its gradient, its state and temporaries, with this step's numbers. The rows of
 * the rule "programs" run programs, a block of elements that stays in the first-level cache at a
 * time; their scalars are the address of an of_program.
 */
#ifndef OPTFUSE_PROGRAM_H
#define OPTFUSE_PROGRAM_H

#include "kernels.h"

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Registers: the parameter, the gradient, the state tensors, temporaries. */
enum {
    OF_REGISTER_PARAM,
    OF_REGISTER_GRAD,
    OF_REGISTER_STATE,
    OF_REGISTER_TEMPORARY = OF_REGISTER_STATE + OF_MAX_STATE,
    OF_REGISTERS = 28
};

/* Where a register of span's memory begins; NULL if there is none. number: below
 * OF_REGISTER_TEMPORARY. A program may write the gradient, as PyTorch's operators would. */
static inline void *of_register_memory(const of_span *span, unsigned number) {
    if (number == OF_REGISTER_PARAM)
        return span->param;
    if (number == OF_REGISTER_GRAD)
        return (void *)(uintptr_t)span->grad;
    return span->state[number - OF_REGISTER_STATE];
}

typedef enum of_operator {
#define OF_OPERATOR(name, inputs, result) OF_OPERATOR_##name,
#include "operators.def"
    OF_OPERATORS
} of_operator;

/* to = operator(a, b, c; s, t). What an operator does not read may be any register. */
typedef struct of_instruction {
    unsigned char operation; /* of_operator */
    unsigned char to, a, b, c;
    double s, t;
} of_instruction;

/* s and t as the kernels for GPUs take them, before they are rounded to the type of the
 * computation: there PyTorch multiplies by a divisor's reciprocal, which it makes in double. */
static inline void of_gpu_numbers(const of_instruction *q, double numbers[2]) {
    numbers[0] = q->operation == OF_OPERATOR_div_number ? 1.0 / q->s : q->s;
    numbers[1] = q->operation == OF_OPERATOR_div_number_add_number ? 1.0 / q->t : q->t;
}

/* Whoever makes one owns `code`, which lives and stays as it is as long as updates run it. */
typedef struct of_program {
    const of_instruction *code;
    size_t n;
    /* By of_program_check(), a bit for each register in memory: those whose values it reads,
     * and those that it writes. */
    unsigned reads, writes;
    /* It is more than `code`: the host runs it whole, between its own operators
     * (of_external_host), and says which registers it reads and writes. */
    bool by_host;
} of_program;

/* Joins pairs of instructions where that changes no bit; returns how many are left of n. */
size_t of_program_fuse(of_instruction *code, size_t n);

/* Fills in the rest of *program. NULL, or what is wrong with its code: an unknown operator or
 * register, or a temporary that is read before it is written. */
const char *of_program_check(of_program *program);

#ifdef __cplusplus
}
#endif
#endif
