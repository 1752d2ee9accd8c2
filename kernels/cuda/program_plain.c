/* SPDX-License-Identifier: BSD-3-Clause */
/* program_plain.c: programs by PyTorch's CUDA operators, an element at a time on the CPU: the
 * yardstick of program.cu. */
#include "program_element.h"

#include "../cpu/memory.h"

of_kernel_fn OF_KERNEL_NAME(op_by_op);

#define OF_OPERATOR(name, inputs, result)                                                          \
    case OF_OPERATOR_##name:                                                                       \
        return result;

static of_real operate(const of_instruction *q, const of_real *file) {
    const of_form form = {true, false};
    const of_real a = file[q->a], b = file[q->b], c = file[q->c];
    double numbers[2];
    of_gpu_numbers(q, numbers);
    const of_real s = (of_real)numbers[0], t = (of_real)numbers[1];
    switch (q->operation) {
#include "../operators.def"
    default:
        return a;
    }
}

static void update_one(const of_span *span, const of_program *program, size_t at) {
    of_real file[OF_REGISTERS] = {0};
    for (unsigned k = 0; k < OF_REGISTER_TEMPORARY; k++)
        if (program->reads >> k & 1u)
            file[k] = k == OF_REGISTER_GRAD ? of_load_gradient(span, at)
                                            : of_load(of_register_memory(span, k), at);
    for (size_t i = 0; i < program->n; i++)
        file[program->code[i].to] = operate(&program->code[i], file);
    for (unsigned k = 0; k < OF_REGISTER_TEMPORARY; k++)
        if (program->writes >> k & 1u)
            of_store(of_register_memory(span, k), at, file[k]);
}

void OF_KERNEL_NAME(op_by_op)(const of_span *span, const void *scalars) {
    const of_program *program = *(const of_program *const *)scalars;
    for (size_t i = 0; i < span->n; i++)
        update_one(span, program, i);
}
