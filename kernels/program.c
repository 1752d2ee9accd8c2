/* SPDX-License-Identifier: BSD-3-Clause */
/* program.c: what is known of programs without running them. */
#include "program.h"

static const unsigned char inputs_of[] = {
#define OF_OPERATOR(name, inputs, result) inputs,
#include "operators.def"
};

static bool reads(const of_instruction *q, unsigned char from) {
    const unsigned n = inputs_of[q->operation];
    return (n > 0 && q->a == from) || (n > 1 && q->b == from) || (n > 2 && q->c == from);
}

/* The operator that the second makes of the first one's result, which nobody else sees; `copy`: it
 * does not. */
static of_operator pair_of(const of_instruction *first, const of_instruction *second) {
    if (second->a != first->to || second->to != first->to)
        return OF_OPERATOR_copy;
    if (first->operation == OF_OPERATOR_mul_number) {
        if (second->operation == OF_OPERATOR_add && second->b != first->to)
            return OF_OPERATOR_mul_number_add;
        if (second->operation == OF_OPERATOR_addcmul && second->b != first->to &&
            second->c != first->to)
            return OF_OPERATOR_mul_number_addcmul;
    }
    if (first->operation == OF_OPERATOR_div_number && second->operation == OF_OPERATOR_add_number)
        return OF_OPERATOR_div_number_add_number;
    return OF_OPERATOR_copy;
}

size_t of_program_fuse(of_instruction *code, size_t n) {
    size_t kept = 0;
    for (size_t i = 0; i < n; i++) {
        of_instruction q = code[i];
        const of_operator pair = kept ? pair_of(&code[kept - 1], &q) : OF_OPERATOR_copy;
        if (pair != OF_OPERATOR_copy) {
            const of_instruction first = code[--kept];
            q.operation = (unsigned char)pair;
            q.a = first.a;
            q.t = first.s;
        }
        code[kept++] = q;
    }
    return kept;
}

static bool has_known_numbers(const of_instruction *q) {
    return q->operation < OF_OPERATORS && q->to < OF_REGISTERS && q->a < OF_REGISTERS &&
           q->b < OF_REGISTERS && q->c < OF_REGISTERS;
}

const char *of_program_check(of_program *program) {
    unsigned written = 0, needed = 0;
    for (size_t i = 0; i < program->n; i++) {
        const of_instruction *q = &program->code[i];
        if (!has_known_numbers(q))
            return "it has an unknown operator or register";
        for (unsigned char from = 0; from < OF_REGISTERS; from++)
            if (reads(q, from) && !(written >> from & 1u))
                needed |= 1u << from;
        written |= 1u << q->to;
    }
    const unsigned in_memory = (1u << OF_REGISTER_TEMPORARY) - 1u;
    if (needed & ~in_memory)
        return "it reads a temporary before it writes it";
    program->reads = needed;
    program->writes = written & in_memory;
    return NULL;
}
