/* SPDX-License-Identifier: BSD-3-Clause */
/* programs.c: runs programs (program.h), compiled once per dtype and instruction set. Each
 * operator is a loop over a block of elements; a block's registers are rows of a room that
 * stays in the first-level cache, or, where no conversion is needed, places in memory. As plain
 * C the compiler is told not to vectorize these loops: then they are the yardstick. */
#include "narrow_array.h"
#include "stored.h"

#include "../program.h"
#include "../rules/aten.h"

of_kernel_fn OF_KERNEL_NAME(OF_REFERENCE);

/* Elements. What fits in OF_MOST goes at once, with its tail: a small tensor is one block, so that
 * each operator is called for once, the reference's library above all. */
enum {
    OF_PROGRAM_BLOCK = 512,
    OF_MOST = 4096 / sizeof(of_real),
    OF_ROW = OF_MOST + 16 /* rows meet in few cache sets */
};

typedef void operator_fn(of_real *to, const of_real *a, const of_real *b, const of_real *c,
                         double s, double t, size_t n);

static const of_form body_form = OF_BODY(OF_FUSED), tail_form = OF_TAIL(OF_FUSED);

/* The loop of an operator over elements that take the reference's vector formula, and over its
 * last ones. */
#define OF_LOOP(name, result, kind, the_form)                                                      \
    static void name##_##kind(of_real *to, const of_real *from_a, const of_real *from_b,           \
                              const of_real *from_c, double s, double t, size_t n) {               \
        const of_form form = the_form;                                                             \
        (void)form, (void)from_a, (void)from_b, (void)from_c, (void)s, (void)t;                    \
        OF_NO_ALIAS                                                                                \
        for (size_t i = 0; i < n; i++) {                                                           \
            const of_real a = from_a[i], b = from_b[i], c = from_c[i];                             \
            (void)a, (void)b, (void)c;                                                             \
            to[i] = result;                                                                        \
        }                                                                                          \
    }
#define OF_OPERATOR(name, inputs, result)                                                          \
    OF_LOOP(name, result, body, body_form) OF_LOOP(name, result, tail, tail_form)
#include "../operators.def"

static operator_fn *const loops[][2] = {
#define OF_OPERATOR(name, inputs, result) {name##_body, name##_tail},
#include "../operators.def"
};

/* Elements of a span from `begin` on: n that take the reference's vector formula, and a tail. */
typedef struct of_block {
    size_t begin, n, tail;
} of_block;

static size_t length(const of_block *block) {
    return block->n + block->tail;
}

/* Roots come from the reference's library, in whose vectors an element's place changes nothing. */
static void take_roots(const of_span *span, of_real *to, const of_real *from, size_t n) {
    if (OF_NARROW || !span->square_roots) {
        sqrt_body(to, from, from, from, 0.0, 0.0, n);
        return;
    }
    if (to != from)
        memcpy(to, from, n * sizeof *to);
    span->square_roots(to, n);
}

static void run(const of_instruction *q, of_real *const *at, const of_block *block) {
    of_real *to = at[q->to];
    const of_real *a = at[q->a], *b = at[q->b], *c = at[q->c];
    const size_t n = block->n;
    if (n)
        loops[q->operation][0](to, a, b, c, q->s, q->t, n);
    if (block->tail)
        loops[q->operation][1](to + n, a + n, b + n, c + n, q->s, q->t, block->tail);
}

static void run_code(const of_span *span, const of_program *program, of_real *const *at,
                     const of_block *block) {
    for (size_t i = 0; i < program->n; i++) {
        const of_instruction *q = &program->code[i];
        if (q->operation == OF_OPERATOR_sqrt)
            take_roots(span, at[q->to], at[q->a], length(block));
        else
            run(q, at, block);
    }
}

static void scale(of_real *to, const of_real *from, const double *factors, size_t n) {
    const double first = factors[0], second = factors[1];
    OF_NO_ALIAS
    for (size_t i = 0; i < n; i++)
        to[i] = aten_mul_number(aten_mul_number(from[i], first), second);
}

/* at: of each register the row in the room. */
#ifdef OF_IS_NARROW

static void run_block(const of_span *span, const of_program *program, of_real *const *at,
                      const of_block *block) {
    const size_t n = length(block);
    for (unsigned k = 0; k < OF_REGISTER_TEMPORARY; k++)
        if (program->reads >> k & 1u)
            widen(at[k], (const of_stored *)of_register_memory(span, k) + block->begin, n);
    if (span->factors)
        scale(at[OF_REGISTER_GRAD], at[OF_REGISTER_GRAD], span->factors, n);
    run_code(span, program, at, block);
    for (unsigned k = 0; k < OF_REGISTER_TEMPORARY; k++)
        if (program->writes >> k & 1u)
            narrow((of_stored *)of_register_memory(span, k) + block->begin, at[k], n);
}

#else

static void run_block(const of_span *span, const of_program *program, of_real *const *rows,
                      const of_block *block) {
    of_real *at[OF_REGISTERS];
    memcpy(at, rows, sizeof at);
    for (unsigned k = 0; k < OF_REGISTER_TEMPORARY; k++) {
        of_real *memory = of_register_memory(span, k);
        if (memory)
            at[k] = memory + block->begin;
    }
    if (span->factors) {
        of_real *scaled = rows[OF_REGISTER_GRAD];
        scale(scaled, at[OF_REGISTER_GRAD], span->factors, length(block));
        at[OF_REGISTER_GRAD] = scaled;
    }
    run_code(span, program, at, block);
}

#endif

/* The next one of `body` elements that take the vector formula, and of `tail` behind them. */
static of_block next_block(size_t begin, size_t body, size_t tail) {
    if (body + tail <= OF_MOST)
        return (of_block){begin, body, tail};
    if (body)
        return (of_block){begin, body < OF_PROGRAM_BLOCK ? body : OF_PROGRAM_BLOCK, 0};
    return (of_block){begin, 0, OF_PROGRAM_BLOCK};
}

void OF_KERNEL_NAME(OF_REFERENCE)(const of_span *span, const void *scalars) {
    _Alignas(64) of_real room[OF_REGISTERS * OF_ROW];
    const of_program *program = *(const of_program *const *)scalars;
    of_real *at[OF_REGISTERS];
    for (size_t k = 0; k < OF_REGISTERS; k++)
        at[k] = room + k * OF_ROW;
    size_t body = span->n - span->tail, tail = span->tail;
    while (body + tail) {
        const of_block block = next_block(span->n - body - tail, body, tail);
        run_block(span, program, at, &block);
        body -= block.n;
        tail -= block.tail;
    }
}
