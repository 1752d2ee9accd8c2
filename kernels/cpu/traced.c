/* SPDX-License-Identifier: BSD-3-Clause */
/* traced.c: runs programs (program.h), compiled once per dtype and instruction set. Each
 * operator is a loop over a block of elements; a block's registers are rows of a room that
 * stays in the first-level cache, or, where no conversion is needed, places in memory. As plain
 * C the compiler is told not to vectorize these loops: then they are the yardstick. */
#include "narrow_array.h"
#include "stored.h"

#include "../program.h"
#include "../rules/aten.h"

of_kernel_fn OF_KERNEL_NAME(OF_REFERENCE);

enum { OF_PROGRAM_BLOCK = 512, OF_ROW = OF_PROGRAM_BLOCK + 16 /* rows meet in few cache sets */ };

typedef void operator_fn(of_real *to, const of_real *a, const of_real *b, const of_real *c,
                         double s, double t, size_t n);

/* The loop of an operator over elements that take the reference's vector formula, and over its
 * last ones. */
#define OF_LOOP(name, result, kind, is_tail)                                                       \
    static void name##_##kind(of_real *to, const of_real *from_a, const of_real *from_b,           \
                              const of_real *from_c, double s, double t, size_t n) {               \
        const of_form form = {OF_FUSED, is_tail};                                                  \
        (void)form, (void)from_a, (void)from_b, (void)from_c, (void)s, (void)t;                    \
        OF_NO_ALIAS                                                                                \
        for (size_t i = 0; i < n; i++) {                                                           \
            const of_real a = from_a[i], b = from_b[i], c = from_c[i];                             \
            (void)a, (void)b, (void)c;                                                             \
            to[i] = result;                                                                        \
        }                                                                                          \
    }
#define OF_OPERATOR(name, inputs, result)                                                          \
    OF_LOOP(name, result, body, false) OF_LOOP(name, result, tail, true)
#include "../operators.def"

static operator_fn *const loops[][2] = {
#define OF_OPERATOR(name, inputs, result) {name##_body, name##_tail},
#include "../operators.def"
};

typedef struct of_block {
    const of_span *span;
    const of_program *program;
    bool is_tail;
    of_real *rows; /* of the room, OF_ROW elements each, one for each register */
} of_block;

/* Roots of whole blocks come from the reference's library. */
static void take_roots(const of_span *span, of_real *to, const of_real *from, size_t n) {
    if (OF_NARROW || !span->square_roots) {
        sqrt_body(to, from, from, from, 0.0, 0.0, n);
        return;
    }
    if (to != from)
        memcpy(to, from, n * sizeof *to);
    span->square_roots(to, n);
}

static void run_code(const of_block *block, of_real *const *at, size_t n) {
    const of_program *program = block->program;
    for (size_t i = 0; i < program->n; i++) {
        const of_instruction *q = &program->code[i];
        if (q->operation == OF_OPERATOR_sqrt)
            take_roots(block->span, at[q->to], at[q->a], n);
        else
            loops[q->operation][block->is_tail](at[q->to], at[q->a], at[q->b], at[q->c], q->s, q->t,
                                                n);
    }
}

/* Where a register of span's memory begins; NULL if there is none. */
static void *memory_of(const of_span *span, unsigned number) {
    if (number == OF_REGISTER_PARAM)
        return span->param;
    if (number == OF_REGISTER_GRAD)
        return (void *)(uintptr_t)span->grad; /* a program may write it, as PyTorch's would */
    return span->state[number - OF_REGISTER_STATE];
}

static void scale(of_real *to, const of_real *from, const double *factors, size_t n) {
    const double first = factors[0], second = factors[1];
    OF_NO_ALIAS
    for (size_t i = 0; i < n; i++)
        to[i] = aten_mul_number(aten_mul_number(from[i], first), second);
}

#ifdef OF_IS_NARROW

static void run_block(const of_block *block, size_t begin, size_t n) {
    const of_span *span = block->span;
    of_real *at[OF_REGISTERS];
    for (unsigned k = 0; k < OF_REGISTERS; k++)
        at[k] = block->rows + (size_t)k * OF_ROW;
    for (unsigned k = 0; k < OF_REGISTER_TEMPORARY; k++)
        if (block->program->reads >> k & 1u)
            widen(at[k], (const of_stored *)memory_of(span, k) + begin, n);
    if (span->factors)
        scale(at[OF_REGISTER_GRAD], at[OF_REGISTER_GRAD], span->factors, n);
    run_code(block, at, n);
    for (unsigned k = 0; k < OF_REGISTER_TEMPORARY; k++)
        if (block->program->writes >> k & 1u)
            narrow((of_stored *)memory_of(span, k) + begin, at[k], n);
}

#else

static void run_block(const of_block *block, size_t begin, size_t n) {
    const of_span *span = block->span;
    of_real *at[OF_REGISTERS];
    for (unsigned k = 0; k < OF_REGISTERS; k++) {
        of_real *memory = k < OF_REGISTER_TEMPORARY ? memory_of(span, k) : NULL;
        at[k] = memory ? memory + begin : block->rows + (size_t)k * OF_ROW;
    }
    if (span->factors) {
        of_real *scaled = block->rows + (size_t)OF_REGISTER_GRAD * OF_ROW;
        scale(scaled, at[OF_REGISTER_GRAD], span->factors, n);
        at[OF_REGISTER_GRAD] = scaled;
    }
    run_code(block, at, n);
}

#endif

static void run_blocks(const of_block *block, size_t begin, size_t end) {
    for (; begin < end; begin += OF_PROGRAM_BLOCK)
        run_block(block, begin, end - begin < OF_PROGRAM_BLOCK ? end - begin : OF_PROGRAM_BLOCK);
}

void OF_KERNEL_NAME(OF_REFERENCE)(const of_span *span, const void *scalars) {
    _Alignas(64) of_real rows[OF_REGISTERS * OF_ROW];
    const of_block body = {span, *(const of_program *const *)scalars, false, rows};
    const of_block tail = {span, body.program, true, rows};
    run_blocks(&body, 0, span->n - span->tail);
    run_blocks(&tail, span->n - span->tail, span->n);
}
