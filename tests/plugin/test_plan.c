/* SPDX-License-Identifier: BSD-3-Clause */
/* Plans: what is refused and how it is said, ownership, the end of a plan. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

static of_status create(const of_host *host, const char *rule, const of_plan_options *options) {
    of_plan *plan = (of_plan *)&plan;
    of_status status = of_plan_create(host, rule, options, &plan);
    if (status != OF_OK)
        ck_assert_ptr_null(plan);
    of_plan_release(plan);
    return status;
}

static void check_message(const char *part) {
    ck_assert_msg(strstr(of_error_message(), part), "\"%s\" lacks \"%s\"", of_error_message(),
                  part);
}

START_TEST(unknown_rule_is_refused_with_the_known_ones) {
    fake_host *host = fake_host_new();
    ck_assert_int_eq(create(&host->table, "lbfgs", NULL), OF_INVALID);
    ck_assert_ptr_nonnull(
        strstr(of_error_message(), "unknown rule 'lbfgs'; known: adam, sgd, rmsprop, "));
    ck_assert_int_eq(create(&host->table, NULL, NULL), OF_INVALID);
    fake_host_free(host);
}
END_TEST

START_TEST(host_of_another_abi_is_refused) {
    fake_host *host = fake_host_new();
    of_host wrong = host->table;
    wrong.abi_version = OF_ABI_VERSION + 1;
    ck_assert_int_eq(create(&wrong, "adam", NULL), OF_INVALID);
    char expected[80];
    snprintf(expected, sizeof expected, "ABI version %d, this library has %d", OF_ABI_VERSION + 1,
             OF_ABI_VERSION);
    check_message(expected);
    ck_assert_uint_eq(of_abi_version(), OF_ABI_VERSION);
    wrong = host->table;
    wrong.struct_size -= 8;
    ck_assert_int_eq(create(&wrong, "adam", NULL), OF_INVALID);
    check_message("of_host has");
    wrong = host->table;
    wrong.settle = NULL;
    ck_assert_int_eq(create(&wrong, "adam", NULL), OF_INVALID);
    check_message("not optional");
    wrong = host->table;
    wrong.log = NULL;
    wrong.prefetch = NULL;
    ck_assert_int_eq(create(&wrong, "adam", NULL), OF_OK);
    fake_host_free(host);
}
END_TEST

START_TEST(optional_tables_of_another_build_or_with_holes_are_refused) {
    fake_host *host = fake_host_new();
    const of_plan_options backward = {.struct_size = sizeof backward, .mode = OF_BACKWARD};
    of_host wrong = host->table;
    of_backward_host small = *wrong.backward;
    small.struct_size -= 8;
    wrong.backward = &small;
    ck_assert_int_eq(create(&wrong, "adam", NULL), OF_INVALID);
    check_message("the host's of_backward_host has");
    of_scaling_host hole = *wrong.scaling;
    hole.keep = NULL;
    wrong = host->table;
    wrong.scaling = &hole;
    ck_assert_int_eq(create(&wrong, "adam", NULL), OF_INVALID);
    check_message("a function of the host's of_scaling_host that is not optional is NULL");
    wrong.scaling = NULL;
    wrong.backward = NULL;
    ck_assert_int_eq(create(&wrong, "adam", NULL), OF_OK);
    ck_assert_int_eq(create(&wrong, "adam", &backward), OF_INVALID);
    check_message("of_backward_host");
    fake_host_free(host);
}
END_TEST

START_TEST(bad_options_are_refused) {
    fake_host *host = fake_host_new();
    of_plan_options good = {.struct_size = sizeof good};
    ck_assert_int_eq(create(&host->table, "sgd", &good), OF_OK);
    of_plan_options bad = good;
    bad.struct_size = 8;
    ck_assert_int_eq(create(&host->table, "sgd", &bad), OF_INVALID);
    check_message("of_plan_options has 8 bytes");
    bad = good;
    bad.mode = (of_mode)2;
    ck_assert_int_eq(create(&host->table, "sgd", &bad), OF_INVALID);
    bad = good;
    bad.isa = OF_ISA_COUNT;
    ck_assert_int_eq(create(&host->table, "sgd", &bad), OF_INVALID);
    bad = good;
    bad.reference = OF_REF_COUNT;
    ck_assert_int_eq(create(&host->table, "sgd", &bad), OF_INVALID);
    fake_host_free(host);
}
END_TEST

START_TEST(isa_is_at_most_the_one_asked_for) {
    fake_host *host = fake_host_new();
    of_plan *plan;
    ck_assert_int_eq(of_plan_create(&host->table, "adam", NULL, &plan), OF_OK);
    ck_assert_str_eq(of_plan_isa(plan, OF_FLOAT32), of_isa_name(of_isa_detect()));
    ck_assert_str_eq(of_plan_isa(plan, OF_DTYPE_COUNT), "none");
    of_plan_release(plan);
    of_plan_options options = {.struct_size = sizeof options, .isa = OF_ISA_BASELINE};
    ck_assert_int_eq(of_plan_create(&host->table, "adam", &options, &plan), OF_OK);
    ck_assert_str_eq(of_plan_isa(plan, OF_FLOAT32), "baseline");
    of_plan_release(plan);
    fake_host_free(host);
}
END_TEST

START_TEST(groups_need_the_rules_hyper_parameters_and_an_order) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    ck_assert_str_eq(of_plan_rule(f->plan)->name, "adam");
    ck_assert_int_eq(of_plan_set_group(f->plan, 0, f->hyper[0], 3), OF_INVALID);
    ck_assert_str_eq(of_error_message(), "adam has 8 hyper-parameters, not 3");
    ck_assert_int_eq(of_plan_set_group(f->plan, 3, f->hyper[0], 8), OF_INVALID);
    check_message("group 3: the plan has 2 groups");
    double found[OF_MAX_HYPER];
    of_plan_get_group(f->plan, 1, found);
    ck_assert_mem_eq(found, f->hyper[1], 8 * sizeof *found);
    of_plan_get_group(f->plan, 3, found);
    ck_assert_mem_eq(found, ((double[8]){0}), 8 * sizeof *found);
    teardown(f);
}
END_TEST

START_TEST(tensor_of_a_refused_slot_is_dropped) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    fake_tensor *tensor = fake_tensor_new(f->host, OF_FLOAT32, 1, 2);
    tensor->owned = true;
    size_t slot = 77;
    ck_assert_int_eq(of_plan_add_slot(f->plan, tensor, 2, false, &slot), OF_INVALID);
    check_message("a slot for group 2: the plan has 2 groups");
    ck_assert_uint_eq(slot, 77);
    ck_assert_int_eq(tensor->drops, 1);
    teardown(f);
}
END_TEST

static void check_refused(fixture *f, const char *part) {
    backward_all(f);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_INVALID);
    check_message(part);
    ck_assert_int_eq(atomic_load(&f->host->holds), 0);
    ck_assert_uint_eq(counts(f).created, 0);
}

START_TEST(unusable_inputs_are_refused_by_name) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    add(f, 10);
    fake_tensor *tensor = add(f, 10)->tensor;
    tensor->device = OF_CUDA;
    check_refused(f, "no kernel of 'adam' for float32 parameters on cuda");
    tensor->device = OF_CPU;
    tensor->mixed = true;
    check_refused(f, "no kernel of 'adam' for float32 parameters on cpu with bfloat16 state");
    tensor->mixed = false;
    tensor->n_state = 1;
    check_refused(f, "the optimizer state 'exp_avg_sq' is missing");
    tensor->n_state = 2;
    tensor->step = -1;
    check_refused(f, "step 0 (first is 1)");
    tensor->step = 0;
    tensor->dtype = OF_DTYPE_COUNT;
    fake_set_grad(tensor, fake_buffer_new(40));
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_INVALID);
    check_message("unknown dtype 4");
    tensor->dtype = OF_FLOAT32;
    fake_set_grad(tensor, NULL);
    backward_all(f);
    step(f);
    teardown(f);
}
END_TEST

START_TEST(slots_grow_without_limit) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    for (size_t i = 0; i < MAX_TWINS; i++)
        ck_assert_uint_eq(add(f, 3)->slot, i);
    backward_all(f);
    step(f);
    teardown(f);
}
END_TEST

START_TEST(slots_can_be_added_while_updates_are_pending) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    for (int i = 0; i < 40; i++) {
        add_to_group(f, 5, (size_t)i % 2);
        backward_all(f);
        step(f);
    }
    teardown(f);
}
END_TEST

START_TEST(clear_launches_what_is_pending_and_drops_all) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    for (int i = 0; i < 3; i++)
        add(f, 100);
    backward_all(f);
    step(f);
    of_plan_clear(f->plan);
    for (size_t i = 0; i < f->n; i++) {
        ck_assert(launched(&f->twins[i]));
        ck_assert_int_eq(f->twins[i].tensor->drops, 1);
    }
    ck_assert(!of_any_pending());
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
    ck_assert_int_eq(of_plan_set_group(f->plan, 0, f->hyper[0], 8), OF_OK);
    twin *t = add(f, 10);
    backward(t);
    expect_update(f, t);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
    teardown(f);
}
END_TEST

START_TEST(clear_forgets_unconfirmed_updates) {
    fixture *f = setup(OF_BACKWARD, OF_BUCKET_NONE);
    gradient(f, add(f, 10));
    ck_assert(of_plan_unconfirmed(f->plan));
    of_plan_clear(f->plan);
    ck_assert(!of_plan_unconfirmed(f->plan));
    teardown(f);
}
END_TEST

START_TEST(last_release_launches_what_is_pending) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 100);
    backward(t);
    step(f);
    of_plan_retain(f->plan);
    of_plan_release(f->plan);
    ck_assert(!launched(t));
    of_plan_release(f->plan);
    ck_assert(launched(t));
    ck_assert(!of_any_pending());
    ck_assert_int_eq(t->tensor->drops, 1);
    f->plan = NULL;
    teardown_unchecked(f);
}
END_TEST

START_TEST(counts_tell_where_updates_went) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    for (int i = 0; i < 4; i++)
        add(f, 10);
    f->twins[0].tensor->shared = true;
    backward_all(f);
    step(f);
    fake_use(f->twins[1].tensor->param, false);
    of_counts c = counts(f);
    ck_assert_uint_eq(c.created, 4);
    ck_assert_uint_eq(c.at_once, 1);
    ck_assert_uint_eq(c.in_step, 1);
    ck_assert_uint_eq(c.at_use, 1);
    ck_assert_uint_eq(c.pending, 2);
    of_plan_flush(f->plan);
    c = counts(f);
    ck_assert_uint_eq(c.at_close, 2);
    ck_assert_uint_eq(c.pending, 0);
    ck_assert_uint_eq(c.launches, 3);
    teardown(f);
}
END_TEST

static void *fail_elsewhere(void *unused) {
    (void)unused;
    ck_assert_str_eq(of_error_message(), "");
    of_set_error("%s", "elsewhere");
    return NULL;
}

START_TEST(error_messages_belong_to_their_thread) {
    pthread_t thread;
    of_set_error("here: %d", 1);
    ck_assert_int_eq(pthread_create(&thread, NULL, fail_elsewhere, NULL), 0);
    pthread_join(thread, NULL);
    ck_assert_str_eq(of_error_message(), "here: 1");
}
END_TEST

START_TEST(log_goes_through_the_host) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    ck_assert_ptr_nonnull(strstr(f->host->last_log, "2 plan for adam, forward fusion"));
    twin *t = add(f, 10);
    backward(t);
    step(f);
    fake_use(t->tensor->param, true);
    ck_assert_ptr_nonnull(strstr(f->host->last_log, "another thread used a pending parameter"));
    teardown(f);
}
END_TEST

int main(void) {
    setenv("OPTFUSE_LOG", "error", 1); /* for stderr: a host gets all messages */
    Suite *suite = suite_create("plan");
    TCase *refusals = tcase_create("refusals");
    tcase_add_test(refusals, unknown_rule_is_refused_with_the_known_ones);
    tcase_add_test(refusals, host_of_another_abi_is_refused);
    tcase_add_test(refusals, optional_tables_of_another_build_or_with_holes_are_refused);
    tcase_add_test(refusals, bad_options_are_refused);
    tcase_add_test(refusals, groups_need_the_rules_hyper_parameters_and_an_order);
    tcase_add_test(refusals, tensor_of_a_refused_slot_is_dropped);
    tcase_add_test(refusals, unusable_inputs_are_refused_by_name);
    suite_add_tcase(suite, refusals);
    TCase *life = tcase_create("life");
    tcase_add_test(life, isa_is_at_most_the_one_asked_for);
    tcase_add_test(life, slots_grow_without_limit);
    tcase_add_test(life, slots_can_be_added_while_updates_are_pending);
    tcase_add_test(life, clear_launches_what_is_pending_and_drops_all);
    tcase_add_test(life, clear_forgets_unconfirmed_updates);
    tcase_add_test(life, last_release_launches_what_is_pending);
    suite_add_tcase(suite, life);
    TCase *reports = tcase_create("reports");
    tcase_add_test(reports, counts_tell_where_updates_went);
    tcase_add_test(reports, error_messages_belong_to_their_thread);
    tcase_add_test(reports, log_goes_through_the_host);
    suite_add_tcase(suite, reports);
    return run(suite);
}
