/* SPDX-License-Identifier: BSD-3-Clause */
#include "random_program.h"

#include <stdlib.h>

#include "arrays.h"

enum {
    SHORT_CODE = 12,
    LONG_CODE = MOST_INSTRUCTIONS - (OF_REGISTERS - OF_REGISTER_TEMPORARY),
    STRIDE = 19 /* so that comparisons, which are neighbours, do not follow each other */
};

static const unsigned char inputs_of[] = {
#define OF_OPERATOR(name, inputs, result) inputs,
#include "operators.def"
};

static unsigned char random_register(unsigned among, uint64_t *random) {
    unsigned char number;
    do
        number = (unsigned char)(random_next(random) % OF_REGISTERS);
    while (!(among >> number & 1u));
    return number;
}

static const double numbers[] = {-1.0, 0.0, 0.3, 0.5, 0.9, 1.0, 1e-8, 70000.0};

static void any_numbers(of_instruction *q, uint64_t *random) {
    q->s = numbers[random_next(random) % 8];
    q->t = numbers[random_next(random) % 8];
}

static size_t any_code(of_instruction *code, bool keeps_gradient, unsigned n_registers,
                       uint64_t *random) {
    const unsigned in_memory = (1u << OF_REGISTER_TEMPORARY) - 1u;
    const unsigned temporaries = ~in_memory & ((1u << n_registers) - 1u);
    const unsigned kept = keeps_gradient ? 1u << OF_REGISTER_GRAD : 0u;
    unsigned written = (in_memory & (unsigned)random_next(random)) | 1u << OF_REGISTER_PARAM;
    const unsigned may_write = (written | temporaries) & ~kept;
    const size_t n = 1 + random_next(random) % SHORT_CODE;
    for (size_t i = 0; i < n; i++) {
        of_instruction *q = &code[i];
        q->operation = (unsigned char)(random_next(random) % OF_OPERATORS);
        q->a = random_register(written, random);
        q->b = random_register(written, random);
        q->c = random_register(written, random);
        q->to = random_register(may_write, random);
        any_numbers(q, random);
        written |= 1u << q->to;
    }
    return n;
}

/* Registers, a bit for each. */
typedef struct values {
    unsigned memory, temporaries;
    unsigned may_write;
    unsigned known;  /* that have a value */
    unsigned unread; /* whose value no instruction has read since it was written */
} values;

static values first_values(bool keeps_gradient, unsigned n_registers, uint64_t *random) {
    const unsigned states = (unsigned)(random_next(random) % (OF_MAX_STATE + 1));
    const unsigned all = n_registers + OF_MAX_STATE - states;
    const unsigned end = all < OF_REGISTERS ? all : OF_REGISTERS;
    values v = {.memory = (1u << (OF_REGISTER_STATE + states)) - 1u,
                .temporaries = (1u << end) - (1u << OF_REGISTER_TEMPORARY)};
    const unsigned kept = keeps_gradient ? 1u << OF_REGISTER_GRAD : 0u;
    const unsigned late = (unsigned)(random_next(random) & random_next(random));
    const unsigned only_read = (unsigned)(random_next(random) & random_next(random));
    v.known = v.unread = (v.memory & ~late) | 1u << OF_REGISTER_GRAD;
    v.may_write = ((v.memory & ~only_read) | 1u << OF_REGISTER_PARAM | v.temporaries) & ~kept;
    return v;
}

static unsigned char take(values *v, uint64_t *random) {
    const unsigned char number = random_register(v->unread ? v->unread : v->known, random);
    v->unread &= ~(1u << number);
    return number;
}

static void take_all(values *v, of_instruction *q, uint64_t *random) {
    const unsigned inputs = inputs_of[q->operation];
    q->a = inputs > 0 ? take(v, random) : random_register(v->known, random);
    q->b = inputs > 1 ? take(v, random) : random_register(v->known, random);
    q->c = inputs > 2 ? take(v, random) : random_register(v->known, random);
}

static void put(values *v, of_instruction *q, unsigned char to) {
    q->to = to;
    v->known |= 1u << to;
    v->unread |= 1u << to;
}

/* Temporaries that nobody has read are added to what is in memory. */
static size_t collect(values *v, of_instruction *code, uint64_t *random) {
    size_t n = 0;
    while (v->unread & v->temporaries) {
        of_instruction *q = &code[n++];
        const unsigned char from = random_register(v->unread & v->temporaries, random);
        const unsigned char to = random_register(v->may_write & v->memory, random);
        const bool is_first = !(v->known >> to & 1u);
        *q = (of_instruction){.operation = is_first ? OF_OPERATOR_copy : OF_OPERATOR_add,
                              .a = is_first ? from : to,
                              .b = from,
                              .c = from,
                              .s = 1.0};
        v->unread &= ~(1u << from);
        put(v, q, to);
    }
    return n;
}

/* Operators take turns, so that few programs have all. The code ends where each register that it
 * may write has a value that nobody has read. */
static size_t thrifty_code(of_instruction *code, bool keeps_gradient, unsigned n_registers,
                           uint64_t *random) {
    values v = first_values(keeps_gradient, n_registers, random);
    const uint64_t first = random_next(random) % OF_OPERATORS;
    const size_t most = 6 + random_next(random) % (LONG_CODE - 5);
    size_t n = 0;
    for (; n < most; n++) {
        values after = v;
        of_instruction *q = &code[n];
        q->operation = (unsigned char)((first + STRIDE * n) % OF_OPERATORS);
        any_numbers(q, random);
        take_all(&after, q, random);
        if (!(after.may_write & ~after.unread))
            break;
        put(&after, q, random_register(after.may_write & ~after.unread, random));
        v = after;
    }
    return n + collect(&v, code + n, random);
}

of_program random_program(of_instruction *code, bool keeps_gradient, unsigned n_registers,
                          uint64_t *random) {
    of_program program = {.code = code};
    program.n = random_next(random) % 4 ? thrifty_code(code, keeps_gradient, n_registers, random)
                                        : any_code(code, keeps_gradient, n_registers, random);
    if (of_program_check(&program))
        abort();
    return program;
}
