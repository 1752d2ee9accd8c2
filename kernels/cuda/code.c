/* SPDX-License-Identifier: BSD-3-Clause */
/* code.c: a program's instructions as program.cu reads them. */
#include <string.h>

#include "launch.h"

/* In the kernel temporaries begin right behind the last state tensor that the program uses. */
static unsigned char row_of(const of_program *program, unsigned number) {
    unsigned states = 0;
    for (unsigned used = (program->reads | program->writes) >> OF_REGISTER_STATE; used; used >>= 1)
        states++;
    if (number < OF_REGISTER_TEMPORARY)
        return (unsigned char)number;
    return (unsigned char)(number - OF_REGISTER_TEMPORARY + OF_REGISTER_STATE + states);
}

static of_instruction placed(const of_program *program, const of_instruction *q) {
    of_instruction p = *q;
    p.to = row_of(program, q->to);
    p.a = row_of(program, q->a);
    p.b = row_of(program, q->b);
    p.c = row_of(program, q->c);
    return p;
}

static bool fits(const of_instruction *q) {
    return q->operation < OF_OPERATORS && q->to < OF_CUDA_REGISTERS && q->a < OF_CUDA_REGISTERS &&
           q->b < OF_CUDA_REGISTERS && q->c < OF_CUDA_REGISTERS;
}

/* Rows up to the last that an instruction names; it may name one that it does not read. */
static unsigned rows_of(const of_instruction *q) {
    const unsigned char numbers[] = {q->to, q->a, q->b, q->c};
    unsigned rows = 0;
    for (unsigned i = 0; i < sizeof numbers; i++)
        rows = numbers[i] < rows ? rows : numbers[i] + 1u;
    return rows;
}

static uint64_t packed(const of_instruction *q) {
    const unsigned char parts[] = {q->operation, q->to, q->a, q->b, q->c};
    uint64_t word = 0;
    for (unsigned i = 0; i < sizeof parts; i++)
        word |= (uint64_t)parts[i] << 8 * i;
    return word;
}

/* GPUs are slow at double: numbers come rounded. */
static void put_numbers(uint64_t *to, of_dtype dtype, const of_instruction *q) {
    double wide[2];
    of_gpu_numbers(q, wide);
    const float narrow[] = {(float)wide[0], (float)wide[1]};
    if (dtype == OF_FLOAT64)
        memcpy(to, wide, sizeof wide);
    else
        memcpy(to, narrow, sizeof narrow);
}

const char *of_cuda_put_code(of_cuda_large_table *table, of_dtype dtype,
                             const of_program *program, unsigned *rows) {
    const size_t words = of_cuda_instruction_words(dtype);
    if (program->n > OF_CUDA_MOST_CODE)
        return "the program has more instructions than the kernels' arguments hold";
    *rows = 0;
    for (size_t i = 0; i < program->n; i++) {
        const of_instruction q = placed(program, &program->code[i]);
        if (!fits(&q))
            return "the program has more state and temporaries at once than the kernels have "
                   "registers for";
        *rows = rows_of(&q) > *rows ? rows_of(&q) : *rows;
        table->words[i * words] = packed(&q);
        put_numbers(&table->words[i * words + 1], dtype, &q);
    }
    table->common.code = (uint16_t)program->n;
    table->common.reads = (uint16_t)program->reads;
    table->common.writes = (uint16_t)program->writes;
    return NULL;
}
