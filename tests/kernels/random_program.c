/* SPDX-License-Identifier: BSD-3-Clause */
#include "random_program.h"

#include <stdlib.h>

#include "arrays.h"

static unsigned char random_register(unsigned among, uint64_t *random) {
    unsigned char number;
    do
        number = (unsigned char)(random_next(random) % OF_REGISTERS);
    while (!(among >> number & 1u));
    return number;
}

of_program random_program(of_instruction *code, bool keeps_gradient, unsigned n_registers,
                          uint64_t *random) {
    static const double numbers[] = {-1.0, 0.0, 0.3, 0.5, 0.9, 1.0, 1e-8, 70000.0};
    const unsigned in_memory = (1u << OF_REGISTER_TEMPORARY) - 1u;
    const unsigned temporaries = ~in_memory & ((1u << n_registers) - 1u);
    const unsigned kept = keeps_gradient ? 1u << OF_REGISTER_GRAD : 0u;
    unsigned written = (in_memory & (unsigned)random_next(random)) | 1u << OF_REGISTER_PARAM;
    const unsigned may_write = (written | temporaries) & ~kept;
    of_program program = {.code = code, .n = 1 + random_next(random) % MOST_INSTRUCTIONS};
    for (size_t i = 0; i < program.n; i++) {
        of_instruction *q = &code[i];
        q->operation = (unsigned char)(random_next(random) % OF_OPERATORS);
        q->a = random_register(written, random);
        q->b = random_register(written, random);
        q->c = random_register(written, random);
        q->to = random_register(may_write, random);
        q->s = numbers[random_next(random) % 8];
        q->t = numbers[random_next(random) % 8];
        written |= 1u << q->to;
    }
    if (of_program_check(&program))
        abort();
    return program;
}
