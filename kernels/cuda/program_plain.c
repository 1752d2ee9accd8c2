/* SPDX-License-Identifier: BSD-3-Clause */
/* program_plain.c: programs by PyTorch's CUDA operators, an element at a time on the CPU: the
 * yardstick of program.cu. */
#include "program_element.h"

#include "../cpu/memory.h"

of_kernel_fn OF_KERNEL_NAME(op_by_op);

static void update_one(const of_span *span, const of_program *program, size_t at) {
    of_real file[OF_REGISTERS] = {0};
    for (unsigned k = 0; k < OF_REGISTER_TEMPORARY; k++)
        if (program->reads >> k & 1u)
            file[k] = k == OF_REGISTER_GRAD ? of_load_gradient(span, at)
                                            : of_load(of_register_memory(span, k), at);
    for (size_t i = 0; i < program->n; i++) {
        const of_instruction *q = &program->code[i];
        double numbers[2];
        of_gpu_numbers(q, numbers);
        of_operate(q->operation, 1, &file[q->to], &file[q->a], &file[q->b], &file[q->c],
                   (of_real)numbers[0], (of_real)numbers[1]);
    }
    for (unsigned k = 0; k < OF_REGISTER_TEMPORARY; k++)
        if (program->writes >> k & 1u)
            of_store(of_register_memory(span, k), at, file[k]);
}

void OF_KERNEL_NAME(op_by_op)(const of_span *span, const void *scalars) {
    const of_program *program = *(const of_program *const *)scalars;
    for (size_t i = 0; i < span->n; i++)
        update_one(span, program, i);
}
