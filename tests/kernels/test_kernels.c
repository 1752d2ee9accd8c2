/* SPDX-License-Identifier: BSD-3-Clause */
/* The kernel table, its look-ups, and what single updates compute. That all
 * rows of one rule agree is kernel_check's part. */
#include <check.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

/* Hyper-parameters in the order of the rules' names. */
enum { LR, BETA1, BETA2, EPS, DECAY, AMSGRAD, MAXIMIZE, DECOUPLED };
enum { sgd_lr, MOMENTUM, DAMPENING, SGD_DECAY, NESTEROV, sgd_maximize };

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

START_TEST(rules_are_found_by_name) {
    ck_assert_str_eq(rule_of("adam")->name, "adam");
    ck_assert_str_eq(rule_of("sgd")->name, "sgd");
    ck_assert_ptr_null(of_rule_find("lbfgs"));
    ck_assert_ptr_null(of_rule_find(""));
}
END_TEST

START_TEST(state_names_are_those_of_torch) {
    const of_rule *adam = rule_of("adam"), *sgd = rule_of("sgd");
    ck_assert_uint_eq(adam->n_state, 3);
    ck_assert_str_eq(adam->state[0], "exp_avg");
    ck_assert_str_eq(adam->state[1], "exp_avg_sq");
    ck_assert_str_eq(adam->state[2], "max_exp_avg_sq");
    ck_assert_uint_eq(sgd->n_state, 1);
    ck_assert_str_eq(sgd->state[0], "momentum_buffer");
}
END_TEST

START_TEST(rules_fit_their_limits) {
    for (const of_rule *rule = of_rules; rule->name; rule++) {
        ck_assert_uint_le(rule->n_state, OF_MAX_STATE);
        ck_assert_uint_le(rule->n_hyper, OF_MAX_HYPER);
        ck_assert_uint_le(rule->scalars_size, OF_MAX_SCALARS);
    }
}
END_TEST

START_TEST(state_is_used_only_where_the_options_need_it) {
    double adam[OF_MAX_HYPER] = {0}, sgd[OF_MAX_HYPER] = {0};
    ck_assert_uint_eq(rule_of("adam")->state_used(adam), 3);
    adam[AMSGRAD] = 1;
    ck_assert_uint_eq(rule_of("adam")->state_used(adam), 7);
    ck_assert_uint_eq(rule_of("sgd")->state_used(sgd), 0);
    sgd[MOMENTUM] = 0.9;
    ck_assert_uint_eq(rule_of("sgd")->state_used(sgd), 1);
}
END_TEST

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

START_TEST(every_rule_reference_and_dtype_has_its_rows) {
    for (const of_rule *rule = of_rules; rule->name; rule++)
        for (int reference = 0; reference < OF_REF_CUDA_FUSED; reference++)
            for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++)
                for (int isa = 0; isa < OF_ISA_COUNT; isa++)
                    if (of_isa_runs((of_isa)isa))
                        expect_row(rule, (of_reference)reference, (of_dtype)dtype, (of_isa)isa);
}
END_TEST

START_TEST(the_cuda_reference_has_a_plain_row_for_every_dtype) {
    static const char *const names[] = {"adam", "sgd"};
    for (int i = 0; i < 2; i++)
        for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++) {
            const of_kernel *row =
                of_kernel_find(names[i], OF_REF_CUDA_FUSED, (of_dtype)dtype, OF_CPU, last);
            ck_assert(row && row->isa == OF_ISA_C && row->run);
        }
}
END_TEST

START_TEST(rules_that_gpus_have_prepared_for_them_have_a_plain_row_of_that_chain) {
    int n = 0;
    for (const of_rule *rule = of_rules; rule->name; rule++)
        for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++) {
            const of_kernel *row =
                of_kernel_find(rule->name, OF_REF_CUDA_OP_BY_OP, (of_dtype)dtype, OF_CPU, last);
            ck_assert_msg((row != NULL) == (rule->prepare_gpu || rule->runs_programs), "%s %s",
                          rule->name, of_dtype_name((of_dtype)dtype));
            n += row != NULL;
        }
    ck_assert_int_ge(n, 9 * OF_DTYPE_COUNT);
    ck_assert_uint_eq(of_tail(rule_of("lion"), OF_REF_CUDA_OP_BY_OP, OF_BFLOAT16, 32, 1003), 0);
}
END_TEST

START_TEST(the_cuda_reference_takes_a_tensor_in_fours_or_not_at_all) {
    ck_assert_uint_eq(of_tail(rule_of("adam"), OF_REF_CUDA_FUSED, OF_FLOAT32, 32, 1004), 0);
    ck_assert_uint_eq(of_tail(rule_of("adam"), OF_REF_CUDA_FUSED, OF_FLOAT32, 32, 1003), 1003);
    ck_assert_uint_eq(of_tail(rule_of("adam"), OF_REF_CUDA_FUSED, OF_BFLOAT16, 32, 4), 0);
}
END_TEST

START_TEST(what_has_no_row_is_not_found) {
    ck_assert_ptr_null(of_kernel_find("lbfgs", OF_REF_CPU_FUSED, OF_FLOAT32, OF_CPU, OF_ISA_C));
    ck_assert_ptr_null(of_kernel_find("adam", OF_REF_CPU_FUSED, OF_FLOAT32, OF_CUDA, last));
}
END_TEST

START_TEST(rows_are_unique) {
    for (const of_kernel *a = of_kernels; a->rule; a++)
        for (const of_kernel *b = a + 1; b->rule; b++)
            ck_assert(a->run != b->run &&
                      (strcmp(a->rule, b->rule) || a->reference != b->reference ||
                       a->dtype != b->dtype || a->device != b->device || a->isa != b->isa));
}
END_TEST

START_TEST(isa_names_parse_back) {
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
END_TEST

START_TEST(the_best_instruction_set_is_the_last_that_runs) {
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
END_TEST

START_TEST(dtypes_have_sizes_and_names) {
    ck_assert_uint_eq(of_dtype_size(OF_FLOAT32), 4);
    ck_assert_uint_eq(of_dtype_size(OF_FLOAT64), 8);
    ck_assert_uint_eq(of_dtype_size(OF_BFLOAT16), 2);
    ck_assert_uint_eq(of_dtype_size(OF_FLOAT16), 2);
    ck_assert_str_eq(of_dtype_name(OF_FLOAT32), "float32");
    ck_assert_str_eq(of_dtype_name(OF_FLOAT64), "float64");
    ck_assert_str_eq(of_dtype_name(OF_BFLOAT16), "bfloat16");
    ck_assert_str_eq(of_dtype_name(OF_FLOAT16), "float16");
}
END_TEST

START_TEST(the_tail_is_what_does_not_fill_a_vector_of_32_bytes) {
    ck_assert_uint_eq(of_tail(rule_of("adam"), OF_REF_CPU_FUSED, OF_FLOAT32, 32, 1003), 1003 % 8);
    ck_assert_uint_eq(of_tail(rule_of("adam"), OF_REF_CPU_FUSED, OF_FLOAT64, 32, 1003), 1003 % 4);
    ck_assert_uint_eq(of_tail(rule_of("adam"), OF_REF_CPU_FUSED, OF_BFLOAT16, 32, 1003), 1003 % 16);
    ck_assert_uint_eq(of_tail(rule_of("adam"), OF_REF_CPU_FUSED, OF_FLOAT16, 32, 1003), 1003 % 16);
    ck_assert_uint_eq(of_tail(rule_of("adam"), OF_REF_CPU_FUSED_PLAIN, OF_FLOAT32, 32, 7), 7);
    ck_assert_uint_eq(of_tail(rule_of("adam"), OF_REF_CPU_FUSED, OF_FLOAT32, 32, 64), 0);
    ck_assert_uint_eq(of_tail(rule_of("adam"), OF_REF_CPU_FUSED, OF_FLOAT32, 32, 0), 0);
    /* Operators take two vectors at a time. */
    ck_assert_uint_eq(of_tail(rule_of("rmsprop"), OF_REF_CPU_FUSED, OF_FLOAT32, 32, 1003),
                      1003 % 16);
    ck_assert_uint_eq(of_tail(rule_of("rmsprop"), OF_REF_CPU_FUSED, OF_FLOAT16, 64, 1003),
                      1003 % 32);
    /* PyTorch has no AVX-512 build of its fused optimizers. */
    ck_assert_uint_eq(of_tail(rule_of("adam"), OF_REF_CPU_FUSED, OF_FLOAT32, 64, 15), 7);
}
END_TEST

START_TEST(adam_moves_by_lr_at_its_first_step) {
    const double hyper[] = {0.1, 0.9, 0.999, 0.0, 0.0, 0, 0, 0};
    double param = 1.0, average = 0.0, square = 0.0;
    const double grad = -0.25;
    const of_span span = {&param, &grad, {&average, &square, NULL}, 1, 0, NULL, NULL, false};
    update("adam", OF_FLOAT64, hyper, 1, &span);
    ck_assert_double_eq_tol(param, 1.1, 1e-15);
    ck_assert_double_eq_tol(average, -0.025, 1e-17);
    ck_assert_double_eq_tol(square, 0.0625 * 0.001, 1e-17);
}
END_TEST

START_TEST(decoupled_decay_shrinks_the_parameter_and_not_the_gradient) {
    const double hyper[] = {0.1, 0.9, 0.999, 1e-8, 0.5, 0, 0, 1};
    double param = 2.0, average = 0.0, square = 0.0;
    const double grad = 0.0;
    const of_span span = {&param, &grad, {&average, &square, NULL}, 1, 0, NULL, NULL, false};
    update("adam", OF_FLOAT64, hyper, 1, &span);
    ck_assert_double_eq_tol(param, 2.0 * 0.95, 1e-15);
    ck_assert_double_eq(average, 0.0);
}
END_TEST

START_TEST(l2_decay_adds_to_the_gradient) {
    const double hyper[] = {0.1, 0.0, 0.0, 0.0, 0.5, 0, 0, 0};
    double param = 2.0, average = 0.0, square = 0.0;
    const double grad = 1.0;
    const of_span span = {&param, &grad, {&average, &square, NULL}, 1, 0, NULL, NULL, false};
    update("adam", OF_FLOAT64, hyper, 1, &span);
    ck_assert_double_eq(average, 2.0);
    ck_assert_double_eq(square, 4.0);
    ck_assert_double_eq_tol(param, 1.9, 1e-15);
}
END_TEST

START_TEST(maximize_goes_up_the_gradient) {
    const double adam[] = {0.1, 0.9, 0.999, 0.0, 0.0, 0, 1, 0}, sgd[] = {0.1, 0, 0, 0, 0, 1};
    double param = 1.0, average = 0.0, square = 0.0;
    const double grad = 0.5;
    const of_span span = {&param, &grad, {&average, &square, NULL}, 1, 0, NULL, NULL, false};
    update("adam", OF_FLOAT64, adam, 1, &span);
    ck_assert_double_eq_tol(param, 1.1, 1e-15);
    update("sgd", OF_FLOAT64, sgd, 1, &span);
    ck_assert_double_eq_tol(param, 1.15, 1e-15);
}
END_TEST

START_TEST(amsgrad_divides_by_the_largest_square_so_far) {
    const double hyper[] = {0.1, 0.0, 0.0, 0.0, 0.0, 1, 0, 0};
    double param = 1.0, average = 0.0, square = 0.0, largest = 16.0;
    const double grad = 2.0;
    const of_span span = {&param, &grad, {&average, &square, &largest}, 1, 0, NULL, NULL, false};
    update("adam", OF_FLOAT64, hyper, 2, &span);
    ck_assert_double_eq(largest, 16.0);
    ck_assert_double_eq_tol(param, 1.0 - 0.1 * 2.0 / 4.0, 1e-15);
}
END_TEST

START_TEST(amsgrad_meets_nan_as_the_reference_does) {
    const double hyper[] = {0.1, 0.9, 0.9, 1e-8, 0.0, 1, 0, 0};
    float param[2] = {1, 1}, average[2] = {0}, square[2] = {0}, largest[2] = {4, 4};
    const float grad[2] = {NAN, NAN};
    const of_span span = {param, grad, {average, square, largest}, 2, 1, NULL, NULL, false};
    update("adam", OF_FLOAT32, hyper, 1, &span);
    ck_assert_msg(isnan(largest[0]), "the vector formula spreads NaN, got %g", (double)largest[0]);
    ck_assert_msg(largest[1] == 4, "the scalar one keeps the old value, got %g",
                  (double)largest[1]);
}
END_TEST

START_TEST(sgd_without_momentum_follows_the_gradient) {
    const double hyper[] = {0.5, 0.0, 0.0, 0.25, 0, 0};
    double param = 2.0;
    const double grad = 1.0;
    const of_span span = {&param, &grad, {NULL}, 1, 0, NULL, NULL, false};
    update("sgd", OF_FLOAT64, hyper, 1, &span);
    ck_assert_double_eq(param, 2.0 - 0.5 * (1.0 + 0.25 * 2.0));
}
END_TEST

START_TEST(sgd_starts_its_buffer_with_the_gradient) {
    const double hyper[] = {0.5, 0.5, 0.5, 0.0, 0, 0};
    double param = 2.0, buffer = NAN; /* as torch.empty_like may leave it */
    const double grad = 1.0;
    const of_span span = {&param, &grad, {&buffer}, 1, 0, NULL, NULL, false};
    update("sgd", OF_FLOAT64, hyper, 1, &span);
    ck_assert_double_eq(buffer, 1.0); /* without dampening */
    ck_assert_double_eq(param, 1.5);
    update("sgd", OF_FLOAT64, hyper, 2, &span);
    ck_assert_double_eq(buffer, 1.0 * 0.5 + 1.0 * 0.5);
    ck_assert_double_eq(param, 1.0);
}
END_TEST

START_TEST(nesterov_looks_ahead) {
    const double hyper[] = {0.5, 0.5, 0.0, 0.0, 1, 0};
    double param = 2.0, buffer = 0.0;
    const double grad = 1.0;
    const of_span span = {&param, &grad, {&buffer}, 1, 0, NULL, NULL, false};
    update("sgd", OF_FLOAT64, hyper, 1, &span);
    ck_assert_double_eq(param, 2.0 - 0.5 * (1.0 + 0.5 * 1.0));
}
END_TEST

START_TEST(sgd_updates_whole_vectors_of_16_bit_types) {
    const double hyper[] = {1.0, 0.0, 0.0, 0.0, 0, 0};
    uint16_t param[64], grad[64];
    for (int i = 0; i < 64; i++)
        param[i] = 0x4000, grad[i] = 0x3f80; /* bfloat16: 2 and 1 */
    const of_span span = {param, grad, {NULL}, 64, 0, NULL, NULL, false};
    update("sgd", OF_BFLOAT16, hyper, 1, &span);
    for (int i = 0; i < 64; i++)
        ck_assert_uint_eq(param[i], 0x3f80);
}
END_TEST

START_TEST(denormals_are_not_flushed) {
    const double hyper[] = {1.0, 0.0, 0.0, 0.0, 0, 0};
    float param[9];
    const float grad[9] = {0};
    for (int i = 0; i < 9; i++)
        param[i] = 1e-42f;
    const of_span span = {param, grad, {NULL}, 9, 1, NULL, NULL, false};
    update("sgd", OF_FLOAT32, hyper, 1, &span);
    for (int i = 0; i < 9; i++)
        ck_assert(param[i] == 1e-42f);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("kernels");
    TCase *table = tcase_create("table"), *updates = tcase_create("updates");
    tcase_add_test(table, rules_are_found_by_name);
    tcase_add_test(table, state_names_are_those_of_torch);
    tcase_add_test(table, rules_fit_their_limits);
    tcase_add_test(table, state_is_used_only_where_the_options_need_it);
    tcase_add_test(table, every_rule_reference_and_dtype_has_its_rows);
    tcase_add_test(table, the_cuda_reference_has_a_plain_row_for_every_dtype);
    tcase_add_test(table, rules_that_gpus_have_prepared_for_them_have_a_plain_row_of_that_chain);
    tcase_add_test(table, the_cuda_reference_takes_a_tensor_in_fours_or_not_at_all);
    tcase_add_test(table, what_has_no_row_is_not_found);
    tcase_add_test(table, rows_are_unique);
    tcase_add_test(table, isa_names_parse_back);
    tcase_add_test(table, the_best_instruction_set_is_the_last_that_runs);
    tcase_add_test(table, dtypes_have_sizes_and_names);
    tcase_add_test(table, the_tail_is_what_does_not_fill_a_vector_of_32_bytes);
    tcase_add_test(updates, adam_moves_by_lr_at_its_first_step);
    tcase_add_test(updates, decoupled_decay_shrinks_the_parameter_and_not_the_gradient);
    tcase_add_test(updates, l2_decay_adds_to_the_gradient);
    tcase_add_test(updates, maximize_goes_up_the_gradient);
    tcase_add_test(updates, amsgrad_divides_by_the_largest_square_so_far);
    tcase_add_test(updates, amsgrad_meets_nan_as_the_reference_does);
    tcase_add_test(updates, sgd_without_momentum_follows_the_gradient);
    tcase_add_test(updates, sgd_starts_its_buffer_with_the_gradient);
    tcase_add_test(updates, nesterov_looks_ahead);
    tcase_add_test(updates, sgd_updates_whole_vectors_of_16_bit_types);
    tcase_add_test(updates, denormals_are_not_flushed);
    suite_add_tcase(suite, table);
    suite_add_tcase(suite, updates);
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    const int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
