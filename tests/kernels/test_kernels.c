/* SPDX-License-Identifier: BSD-3-Clause */
/* The kernel table, its look-ups, and what single updates compute. That all
 * rows of one rule agree is kernel_check's part. */
#include "suite.h"
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

/* Places of hyper-parameters. */
enum { AMSGRAD = 5, MOMENTUM = 1 };

static const of_rule *rule_of(const char *name) {
    const of_rule *rule = of_rule_find(name);
    ck_assert_msg(rule != NULL, "rule %s is missing", name);
    return rule;
}

/* One update by the plain C row. */
static void update(const char *name, of_dtype dtype, const double *hyper, double step,
                   const of_span *span) {
    double scalars[OF_MAX_SCALARS / sizeof(double)];
    const of_kernel *row = of_kernel_find(name, OF_REF_CPU_FUSED, dtype, OF_CPU, OF_ISA_C);
    ck_assert(row != NULL);
    of_count count = {.step = step};
    rule_of(name)->prepare(hyper, &count, scalars);
    row->run(span, scalars);
}

TEST(rules_are_found_by_name_and_their_state_is_torchs) {
    const of_rule *adam = rule_of("adam"), *sgd = rule_of("sgd");
    ck_assert_str_eq(adam->name, "adam");
    ck_assert_str_eq(sgd->name, "sgd");
    ck_assert_uint_eq(adam->n_state, 3);
    ck_assert_str_eq(adam->state[0], "exp_avg");
    ck_assert_str_eq(adam->state[1], "exp_avg_sq");
    ck_assert_str_eq(adam->state[2], "max_exp_avg_sq");
    ck_assert_uint_eq(sgd->n_state, 1);
    ck_assert_str_eq(sgd->state[0], "momentum_buffer");
    ck_assert_ptr_null(of_rule_find("lbfgs"));
    ck_assert_ptr_null(of_rule_find(""));
}

TEST(rules_fit_their_limits) {
    for (const of_rule *rule = of_rules; rule->name; rule++) {
        ck_assert_uint_le(rule->n_state, OF_MAX_STATE);
        ck_assert_uint_le(rule->n_hyper, OF_MAX_HYPER);
        ck_assert_uint_le(rule->scalars_size, OF_MAX_SCALARS);
    }
}

TEST(state_is_used_only_where_the_options_need_it) {
    double adam[OF_MAX_HYPER] = {0}, sgd[OF_MAX_HYPER] = {0};
    ck_assert_uint_eq(rule_of("adam")->state_used(adam), 3);
    adam[AMSGRAD] = 1;
    ck_assert_uint_eq(rule_of("adam")->state_used(adam), 7);
    ck_assert_uint_eq(rule_of("sgd")->state_used(sgd), 0);
    sgd[MOMENTUM] = 0.9;
    ck_assert_uint_eq(rule_of("sgd")->state_used(sgd), 1);
}

/* Any row is found below it. */
static const of_isa last = OF_ISA_COUNT - 1;

/* The reference of CPUs that have no more than the baseline. */
#ifdef __aarch64__
static const of_reference baseline = OF_REF_CPU_FUSED;
#else
static const of_reference baseline = OF_REF_CPU_FUSED_PLAIN;
#endif

/* Rules that are chains of operators have those rows that a CPU can need, and
 * the plain C ones. */
static bool is_needed(const of_rule *rule, of_reference reference, of_isa isa) {
    return !rule->op_by_op || isa == OF_ISA_C || isa == OF_ISA_SVE ||
           reference == (isa == OF_ISA_BASELINE ? baseline : OF_REF_CPU_FUSED);
}

static void expect_row(const of_rule *rule, of_reference reference, of_dtype dtype, of_isa isa) {
    const of_kernel *row = of_kernel_find(rule->name, reference, dtype, OF_CPU, isa);
    const bool exact = is_needed(rule, reference, isa);
    ck_assert_msg(row && row->run && (row->isa == isa || !exact), "no %s row for %s %s",
                  of_isa_name(isa), rule->name, of_dtype_name(dtype));
    ck_assert_str_eq(row->rule, rule->name);
    ck_assert_int_eq((int)row->reference, (int)reference);
    ck_assert_int_eq((int)row->dtype, (int)dtype);
}

TEST(every_rule_reference_and_dtype_has_its_rows) {
    for (const of_rule *rule = of_rules; rule->name; rule++)
        for (int reference = 0; reference < OF_REF_CUDA_FUSED; reference++)
            for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++)
                for (int isa = 0; isa < OF_ISA_COUNT; isa++)
                    if (of_isa_runs((of_isa)isa) && !(rule->rounds && dtype == OF_FLOAT64))
                        expect_row(rule, (of_reference)reference, (of_dtype)dtype, (of_isa)isa);
}

TEST(the_cuda_reference_has_a_plain_row_for_every_dtype) {
    static const char *const names[] = {"adam", "sgd"};
    for (int i = 0; i < 2; i++)
        for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++) {
            const of_kernel *row =
                of_kernel_find(names[i], OF_REF_CUDA_FUSED, (of_dtype)dtype, OF_CPU, last);
            ck_assert(row && row->isa == OF_ISA_C && row->run);
        }
}

TEST(rules_that_gpus_have_prepared_for_them_have_a_plain_row_of_that_chain) {
    int n = 0;
    for (const of_rule *rule = of_rules; rule->name; rule++)
        for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++) {
            const of_kernel *row =
                of_kernel_find(rule->name, OF_REF_CUDA_OP_BY_OP, (of_dtype)dtype, OF_CPU, last);
            ck_assert_msg((row != NULL) == ((rule->prepare_gpu && !rule->rounds) || rule->runs_programs), "%s %s",
                          rule->name, of_dtype_name((of_dtype)dtype));
            n += row != NULL;
        }
    ck_assert_int_ge(n, 9 * OF_DTYPE_COUNT);
}

TEST(what_has_no_row_is_not_found) {
    ck_assert_ptr_null(of_kernel_find("lbfgs", OF_REF_CPU_FUSED, OF_FLOAT32, OF_CPU, OF_ISA_C));
    ck_assert_ptr_null(of_kernel_find("adam", OF_REF_CPU_FUSED, OF_FLOAT32, OF_CUDA, last));
}

TEST(rows_are_unique) {
    for (const of_kernel *a = of_kernels; a->rule; a++)
        for (const of_kernel *b = a + 1; b->rule; b++)
            ck_assert(a->run != b->run &&
                      (strcmp(a->rule, b->rule) || a->reference != b->reference ||
                       a->dtype != b->dtype || a->device != b->device || a->isa != b->isa));
}

TEST(isa_names_parse_back) {
    of_isa isa = OF_ISA_C;
    for (int i = 0; i < OF_ISA_COUNT; i++) {
        ck_assert(of_isa_parse(of_isa_name((of_isa)i), &isa));
        ck_assert_int_eq((int)isa, i);
    }
    ck_assert(!of_isa_parse("AVX2", &isa));
    ck_assert(!of_isa_parse("avx", &isa));
    ck_assert(!of_isa_parse("", &isa));
    ck_assert_int_eq(isa, last); /* untouched by failures */
}

TEST(the_best_instruction_set_is_the_last_that_runs) {
    const of_isa best = of_isa_detect();
    ck_assert(of_isa_runs(OF_ISA_C) && of_isa_runs(OF_ISA_BASELINE) && of_isa_runs(best));
    for (int isa = (int)best + 1; isa < OF_ISA_COUNT; isa++)
        ck_assert(!of_isa_runs((of_isa)isa));
#ifdef __aarch64__
    ck_assert(!of_isa_runs(OF_ISA_AVX2) && !of_isa_runs(OF_ISA_AVX512));
#else
    ck_assert(!of_isa_runs(OF_ISA_SVE));
#endif
}

TEST(dtypes_have_sizes_and_names) {
    static const struct {
        size_t size;
        const char *name;
    } dtypes[] = {[OF_FLOAT32] = {4, "float32"},
                  [OF_FLOAT64] = {8, "float64"},
                  [OF_BFLOAT16] = {2, "bfloat16"},
                  [OF_FLOAT16] = {2, "float16"}};
    for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++) {
        ck_assert_uint_eq(of_dtype_size((of_dtype)dtype), dtypes[dtype].size);
        ck_assert_str_eq(of_dtype_name((of_dtype)dtype), dtypes[dtype].name);
    }
}

/* The elements behind the last whole vector of so many bytes. */
TEST(tails_are_those_of_pytorchs_kernels) {
    static const struct {
        const char *rule;
        of_reference reference;
        of_dtype dtype;
        size_t vector_bytes, n, tail;
    } rows[] = {
        {"adam", OF_REF_CPU_FUSED, OF_FLOAT32, 32, 1003, 1003 % 8},
        {"adam", OF_REF_CPU_FUSED, OF_FLOAT64, 32, 1003, 1003 % 4},
        {"adam", OF_REF_CPU_FUSED, OF_BFLOAT16, 32, 1003, 1003 % 16},
        {"adam", OF_REF_CPU_FUSED, OF_FLOAT16, 32, 1003, 1003 % 16},
        {"adam", OF_REF_CPU_FUSED_PLAIN, OF_FLOAT32, 32, 7, 7},
        {"adam", OF_REF_CPU_FUSED, OF_FLOAT32, 32, 64, 0},
        {"adam", OF_REF_CPU_FUSED, OF_FLOAT32, 32, 0, 0},
        /* Operators take two vectors at a time. */
        {"rmsprop", OF_REF_CPU_FUSED, OF_FLOAT32, 32, 1003, 1003 % 16},
        {"rmsprop", OF_REF_CPU_FUSED, OF_FLOAT16, 64, 1003, 1003 % 32},
        /* PyTorch has no AVX-512 build of its fused optimizers. */
        {"adam", OF_REF_CPU_FUSED, OF_FLOAT32, 64, 15, 7},
        /* CUDA's take a tensor in fours or not at all, its operators as a whole. */
        {"adam", OF_REF_CUDA_FUSED, OF_FLOAT32, 32, 1004, 0},
        {"adam", OF_REF_CUDA_FUSED, OF_FLOAT32, 32, 1003, 1003},
        {"adam", OF_REF_CUDA_FUSED, OF_BFLOAT16, 32, 4, 0},
        {"lion", OF_REF_CUDA_OP_BY_OP, OF_BFLOAT16, 32, 1003, 0},
    };
    for (size_t i = 0; i < LENGTH(rows); i++)
        ck_assert_msg(of_tail(rule_of(rows[i].rule), rows[i].reference, rows[i].dtype,
                              rows[i].vector_bytes, rows[i].n) == rows[i].tail,
                      "row %zu", i);
}

/* clang-format off */
/* One update of one float64 element by the plain C row, as the formula has it. Options of adam: lr,
 * beta1, beta2, eps, decay, amsgrad, maximize, decoupled; of sgd: lr, momentum, dampening, decay,
 * nesterov, maximize. */
static const struct {
    const char *what, *rule;
    double hyper[8], step, param, grad, state[3], new_param, new_state[3], near[2];
} updates[] = {
    {"adam moves by lr at its first step", "adam",
     {0.1, 0.9, 0.999}, 1, 1, -0.25, {0}, 1.1, {-0.025, 0.0625 * 0.001}, {1e-15, 1e-17}},
    {"decoupled decay shrinks the parameter and not the gradient", "adam",
     {0.1, 0.9, 0.999, 1e-8, 0.5, 0, 0, 1}, 1, 2, 0, {0}, 2 * 0.95, {0}, {1e-15, 0}},
    {"L2 decay adds to the gradient", "adam",
     {0.1, 0, 0, 0, 0.5}, 1, 2, 1, {0}, 1.9, {2, 4}, {1e-15, 0}},
    {"adam goes up the gradient to maximize", "adam",
     {0.1, 0.9, 0.999, 0, 0, 0, 1}, 1, 1, 0.5, {0}, 1.1, {-0.05, 0.25 * 0.001}, {1e-15, 1e-16}},
    {"amsgrad divides by the largest square so far", "adam",
     {0.1, 0, 0, 0, 0, 1}, 2, 1, 2, {0, 0, 16}, 1 - 0.1 * 2 / 4, {2, 4, 16}, {1e-15, 0}},
    {"sgd without momentum follows the gradient", "sgd",
     {0.5, 0, 0, 0.25}, 1, 2, 1, {0}, 2 - 0.5 * (1 + 0.25 * 2), {0}, {0}},
    {"sgd goes up the gradient to maximize", "sgd",
     {0.1, 0, 0, 0, 0, 1}, 1, 1.1, 0.5, {0}, 1.15, {0}, {1e-15, 0}},
    {"sgd starts its buffer, as torch.empty_like may leave it, undampened", "sgd",
     {0.5, 0.5, 0.5}, 1, 2, 1, {NAN}, 1.5, {1}, {0}},
    {"then it is dampened", "sgd",
     {0.5, 0.5, 0.5}, 2, 1.5, 1, {1}, 1, {1 * 0.5 + 1 * 0.5}, {0}},
    {"nesterov looks ahead", "sgd",
     {0.5, 0.5, 0, 0, 1}, 1, 2, 1, {0}, 2 - 0.5 * (1 + 0.5 * 1), {1}, {0}},
};
/* clang-format on */

TESTS(an_update_is_that_of_the_formula, LENGTH(updates)) {
    const double *near = updates[row].near;
    double param = updates[row].param, state[3];
    memcpy(state, updates[row].state, sizeof state);
    const of_span span = {
        .param = &param, .grad = &updates[row].grad, .state = {&state[0], &state[1], &state[2]}, .n = 1};
    update(updates[row].rule, OF_FLOAT64, updates[row].hyper, updates[row].step, &span);
    ck_assert_msg(fabs(param - updates[row].new_param) <= near[0], "%s: %.17g", updates[row].what,
                  param);
    for (int i = 0; i < 3; i++)
        ck_assert_msg(fabs(state[i] - updates[row].new_state[i]) <= near[1],
                      "%s: state %d is %.17g", updates[row].what, i, state[i]);
}

TEST(amsgrad_meets_nan_as_the_reference_does) {
    const double hyper[] = {0.1, 0.9, 0.9, 1e-8, 0.0, 1, 0, 0};
    float param[2] = {1, 1}, average[2] = {0}, square[2] = {0}, largest[2] = {4, 4};
    const float grad[2] = {NAN, NAN};
    const of_span span = {
        .param = param, .grad = grad, .state = {average, square, largest}, .n = 2, .tail = 1};
    update("adam", OF_FLOAT32, hyper, 1, &span);
    ck_assert_msg(isnan(largest[0]), "the vector formula spreads NaN, got %g", (double)largest[0]);
    ck_assert_msg(largest[1] == 4, "the scalar one keeps the old value, got %g",
                  (double)largest[1]);
}

TEST(sgd_updates_whole_vectors_of_16_bit_types) {
    const double hyper[] = {1.0, 0.0, 0.0, 0.0, 0, 0};
    uint16_t param[64], grad[64];
    for (int i = 0; i < 64; i++)
        param[i] = 0x4000, grad[i] = 0x3f80; /* bfloat16: 2 and 1 */
    const of_span span = {.param = param, .grad = grad, .n = 64};
    update("sgd", OF_BFLOAT16, hyper, 1, &span);
    for (int i = 0; i < 64; i++)
        ck_assert_uint_eq(param[i], 0x3f80);
}

TEST(denormals_are_not_flushed) {
    const double hyper[] = {1.0, 0.0, 0.0, 0.0, 0, 0};
    float param[9];
    const float grad[9] = {0};
    for (int i = 0; i < 9; i++)
        param[i] = 1e-42f;
    const of_span span = {.param = param, .grad = grad, .n = 9, .tail = 1};
    update("sgd", OF_FLOAT32, hyper, 1, &span);
    for (int i = 0; i < 9; i++)
        ck_assert(param[i] == 1e-42f);
}
