/* SPDX-License-Identifier: BSD-3-Clause */
/* test_program.c: what is refused of a program, and which pairs of instructions become one. */
#include <stdlib.h>
#include <string.h>

#include "suite.h"

#include "program.h"

enum {
    P = OF_REGISTER_PARAM,
    G = OF_REGISTER_GRAD,
    S = OF_REGISTER_STATE,
    T = OF_REGISTER_TEMPORARY
};

#define OP(name) OF_OPERATOR_##name

static const char *check(const of_instruction *code, size_t n, of_program *program) {
    *program = (of_program){.code = code, .n = n};
    return of_program_check(program);
}

TEST(what_is_in_memory_is_read_or_written) {
    const of_instruction code[] = {
        {OP(mul_number), T, G, 0, 0, 2.0, 0.0}, {OP(lerp), S, S, T, 0, 0.1, 0.0},
        {OP(fill), S + 1, 0, 0, 0, 0.0, 0.0},   {OP(add), S + 1, S + 1, S, 0, 1.0, 0.0},
        {OP(add), P, P, S + 1, 0, -0.1, 0.0},
    };
    of_program program;
    ck_assert_ptr_null(check(code, 5, &program));
    ck_assert_uint_eq(program.reads, 1u << P | 1u << G | 1u << S);
    ck_assert_uint_eq(program.writes, 1u << P | 1u << S | 1u << (S + 1));
}

TEST(what_cannot_run_is_refused) {
    of_program program;
    const of_instruction unknown[] = {{OF_OPERATORS, P, P, 0, 0, 0.0, 0.0}};
    const of_instruction far[] = {{OP(copy), OF_REGISTERS, P, 0, 0, 0.0, 0.0}};
    const of_instruction from_far[] = {{OP(add), P, P, 255, 0, 0.0, 0.0}};
    const of_instruction early[] = {{OP(add), P, P, T, 0, 1.0, 0.0}};
    ck_assert_ptr_nonnull(check(unknown, 1, &program));
    ck_assert_ptr_nonnull(check(far, 1, &program));
    ck_assert_ptr_nonnull(check(from_far, 1, &program));
    ck_assert_ptr_nonnull(check(early, 1, &program));
    const of_instruction unread[] = {{OP(copy), P, G, 255, 0, 0.0, 0.0}};
    ck_assert_ptr_nonnull(check(unread, 1, &program));
    ck_assert_ptr_null(check(NULL, 0, &program));
}

TEST(pairs_become_one) {
    of_instruction code[] = {
        {OP(mul_number), S, S, 0, 0, 0.9, 0.0},
        {OP(add), S, S, G, 0, 0.1, 0.0},
        {OP(mul_number), S + 1, S + 1, 0, 0, 0.99, 0.0},
        {OP(addcmul), S + 1, S + 1, G, G, 0.01, 0.0},
        {OP(div_number), T, S + 1, 0, 0, 0.5, 0.0},
        {OP(add_number), T, T, 0, 0, 1e-8, 0.0},
        {OP(addcdiv), P, P, S, T, -0.1, 0.0},
    };
    ck_assert_uint_eq(of_program_fuse(code, 7), 4);
    ck_assert_int_eq(code[0].operation, OP(mul_number_add));
    ck_assert(code[0].a == S && code[0].b == G && code[0].t == 0.9 && code[0].s == 0.1);
    ck_assert_int_eq(code[1].operation, OP(mul_number_addcmul));
    ck_assert_int_eq(code[2].operation, OP(div_number_add_number));
    ck_assert(code[2].a == S + 1 && code[2].to == T && code[2].t == 0.5 && code[2].s == 1e-8);
    ck_assert_int_eq(code[3].operation, OP(addcdiv));
}

TEST(pairs_stay_two_where_the_first_result_is_used_again) {
    of_instruction other[] = {{OP(mul_number), T, S, 0, 0, 0.9, 0.0},
                              {OP(add), P, T, G, 0, 0.1, 0.0}};
    of_instruction twice[] = {{OP(mul_number), S, S, 0, 0, 0.9, 0.0},
                              {OP(add), S, S, S, 0, 0.1, 0.0}};
    of_instruction square[] = {{OP(mul_number), S, S, 0, 0, 0.9, 0.0},
                               {OP(addcmul), S, S, G, S, 0.1, 0.0}};
    ck_assert_uint_eq(of_program_fuse(other, 2), 2);
    ck_assert_uint_eq(of_program_fuse(twice, 2), 2);
    ck_assert_uint_eq(of_program_fuse(square, 2), 2);
}

static of_program program_of(of_instruction *code, size_t n) {
    of_program program = {.code = code, .n = n};
    ck_assert_ptr_null(of_program_check(&program));
    return program;
}

/* Both programs on the best row of each dtype, on the same numbers. */
static void expect_same_bits(of_dtype dtype, of_program *a, of_program *b) {
    enum { N = 1003 };
    static double memory[2][3][N];
    for (int i = 0; i < 3 * N; i++)
        ((float *)memory[0])[i] = ((float)rand() / (float)RAND_MAX - 0.5f) * 3.0f;
    memcpy(memory[1], memory[0], sizeof memory[0]);
    of_program *programs[] = {a, b};
    const of_kernel *row =
        of_kernel_find("programs", OF_REF_CPU_FUSED, dtype, OF_CPU, of_isa_detect());
    for (int i = 0; i < 2; i++) {
        of_span span = {.param = memory[i][0], .grad = memory[i][1], .n = N, .tail = 11};
        span.state[0] = memory[i][2];
        row->run(&span, &programs[i]);
    }
    ck_assert_int_eq(memcmp(memory[0], memory[1], sizeof memory[0]), 0);
}

TEST(joined_pairs_have_the_bits_of_two) {
    for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++) {
        of_instruction two[] = {
            {OP(mul_number), S, S, 0, 0, 0.9, 0.0},  {OP(add), S, S, G, 0, 0.1, 0.0},
            {OP(mul_number), P, P, 0, 0, 0.99, 0.0}, {OP(addcmul), P, P, G, S, 0.01, 0.0},
            {OP(div_number), S, S, 0, 0, 0.7, 0.0},  {OP(add_number), S, S, 0, 0, 0.3, 0.0}};
        of_instruction one[6];
        memcpy(one, two, sizeof two);
        of_program a = program_of(two, 6), b = program_of(one, of_program_fuse(one, 6));
        ck_assert_uint_eq(b.n, 3);
        expect_same_bits((of_dtype)dtype, &a, &b);
    }
}
