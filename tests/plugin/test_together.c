/* SPDX-License-Identifier: BSD-3-Clause */
/* Small updates on the CPU that run together: gradients that backward fusion has let
 * wait for each other, and neighbours of what is used in forward fusion. */
#include "fixture.h"

enum { BUCKET = 4000 }; /* bytes: 1000 float32 elements */

/* The gradients of one pass, complete in this order, and its end. *at: where it failed. */
static of_status gradients(fixture *f, const size_t *slots, size_t n, size_t *at) {
    of_pass *pass = begin_pass(f);
    of_status status = OF_OK;
    *at = OF_NO_SLOT;
    for (size_t i = 0; i < n && status == OF_OK; i++)
        status = of_pass_ready(pass, slots[i], at);
    if (status == OF_OK)
        status = of_pass_end(pass, at);
    of_pass_release(pass);
    return status;
}

static fixture *three(void) {
    fixture *f = setup(OF_BACKWARD, 0);
    for (int i = 0; i < 3; i++)
        add(f, 10);
    return f;
}

static void backward_of(fixture *f, const size_t *slots, size_t n) {
    for (size_t i = 0; i < n; i++) {
        backward(&f->twins[slots[i]]);
        expect_update(f, &f->twins[slots[i]]);
    }
}

START_TEST(gradients_that_waited_run_in_one_launch) {
    static const size_t slots[] = {2, 0, 3};
    fixture *f = setup(OF_BACKWARD, 0);
    size_t at = 0;
    for (int i = 0; i < 4; i++)
        add(f, 700 * i);
    for (int step = 0; step < 3; step++) {
        backward_of(f, slots, 3);
        ck_assert_int_eq(gradients(f, slots, 3, &at), OF_OK);
        for (size_t i = 0; i < 3; i++)
            ck_assert(launched(&f->twins[slots[i]]) && of_plan_is_updated(f->plan, slots[i]));
        ck_assert(!of_plan_is_updated(f->plan, 1));
        ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
    }
    ck_assert_uint_eq(counts(f).created, 9);
    ck_assert_uint_eq(counts(f).at_close, 9);
    ck_assert_uint_eq(counts(f).launches, 3);
    teardown(f);
}
END_TEST

START_TEST(those_that_lack_state_get_it) {
    static const size_t slots[] = {0, 1, 2};
    fixture *f = three();
    size_t at = 0;
    f->twins[0].tensor->lacks_state = f->twins[2].tensor->lacks_state = true;
    backward_all(f);
    f->host->refuses = true;
    of_pass *pass = NULL;
    bool first;
    ck_assert_int_eq(of_pass_begin(f->plan, 99999, &pass, &first), OF_REFUSED);
    f->host->refuses = false;
    ck_assert_int_eq(of_pass_begin(f->plan, 99999, &pass, &first), OF_OK);
    f->host->refuses = true;
    for (size_t i = 0; i < 3; i++)
        ck_assert_int_eq(of_pass_ready(pass, i, &at), OF_OK);
    ck_assert_int_eq(of_pass_end(pass, &at), OF_REFUSED);
    ck_assert_str_eq(of_error_message(), "no state for slot 0");
    ck_assert(at == OF_NO_SLOT && !of_plan_unconfirmed(f->plan) && launched(&f->twins[1]));
    of_pass_release(pass);
    f->host->refuses = false;
    for (size_t i = 0; i < 3; i++)
        expect_update(f, &f->twins[i]);
    ck_assert_int_eq(gradients(f, slots, 3, &at), OF_OK);
    ck_assert_int_eq(atomic_load(&f->host->made), 2);
    teardown(f);
}
END_TEST

START_TEST(a_failure_changes_nothing_and_says_where) {
    static const size_t slots[] = {0, 1, 2};
    fixture *f = three();
    size_t at = 0;
    backward_all(f);
    f->twins[1].tensor->broken = true;
    ck_assert_int_eq(gradients(f, slots, 3, &at), OF_INVALID);
    ck_assert_str_eq(of_error_message(), "tensor 1 is broken");
    ck_assert_uint_eq(at, 1);
    f->twins[1].tensor->broken = false;
    ck_assert(!of_plan_unconfirmed(f->plan) && counts(f).created == 0);
    teardown(f);
}
END_TEST

START_TEST(a_second_gradient_is_refused_and_changes_nothing) {
    static const size_t slots[] = {0, 1}, again[] = {2, 1};
    fixture *f = three();
    size_t at = 0;
    backward_of(f, slots, 2);
    ck_assert_int_eq(gradients(f, slots, 2, &at), OF_OK);
    backward(&f->twins[1]);
    backward(&f->twins[2]);
    ck_assert_int_eq(gradients(f, again, 2, &at), OF_TWICE);
    ck_assert(at == 1 && !of_plan_is_updated(f->plan, 2));
    ck_assert(of_plan_is_updated(f->plan, 1) && counts(f).created == 2);
    teardown(f);
}
END_TEST

START_TEST(what_is_exclusive_runs_by_itself) {
    static const size_t slots[] = {0, 1, 2};
    fixture *f = three();
    size_t at = 0;
    f->twins[1].tensor->exclusive = true;
    backward_of(f, slots, 3);
    ck_assert_int_eq(gradients(f, slots, 3, &at), OF_OK);
    ck_assert(of_plan_is_updated(f->plan, 1) && launched(&f->twins[1]));
    ck_assert_uint_eq(counts(f).at_close, 2);
    ck_assert_uint_eq(counts(f).at_once, 1);
    teardown(f);
}
END_TEST

START_TEST(the_host_is_told_whose_inputs_come_next) {
    enum { N = 40, CHOSEN = 34 };
    fixture *f = setup(OF_BACKWARD, 0);
    size_t slots[CHOSEN], at = 0;
    for (int i = 0; i < N; i++)
        add(f, 10);
    for (size_t i = 0; i < CHOSEN; i++)
        slots[i] = CHOSEN - i;
    backward_of(f, slots, CHOSEN);
    ck_assert_int_eq(gradients(f, slots, CHOSEN, &at), OF_OK);
    for (size_t i = 0; i < N; i++)
        ck_assert_int_eq(f->twins[i].tensor->prefetched, i >= 1 && i <= CHOSEN);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
    for (size_t i = 0; i < N; i++) /* 0 is alone among those that come with it */
        ck_assert_int_eq(f->twins[i].tensor->prefetched, i >= 1);
    teardown(f);
}
END_TEST

START_TEST(neighbours_run_at_the_first_use_of_one_of_them) {
    fixture *f = setup(OF_FORWARD, BUCKET);
    for (int i = 0; i < 6; i++)
        add(f, 300);
    backward_all(f);
    step(f);
    fake_use(f->twins[1].tensor->param, false);
    ck_assert(!launched(&f->twins[0]) && !launched(&f->twins[5]));
    for (size_t i = 1; i < 5; i++)
        ck_assert_msg(launched(&f->twins[i]), "%zu", i);
    ck_assert_uint_eq(counts(f).at_use, 4);
    ck_assert_uint_eq(counts(f).launches, 1);
    teardown(f);
}
END_TEST

START_TEST(on_one_thread_fewer_neighbours_run) {
    const int64_t numel = 10000; /* 40 kB: two of them are more than 64 KiB */
    fixture *f = setup(OF_FORWARD, 1 << 20);
    f->host->n_threads = 1;
    for (int i = 0; i < 4; i++)
        add(f, numel);
    backward_all(f);
    step(f);
    fake_use(f->twins[1].tensor->param, false);
    for (size_t i = 0; i < 4; i++)
        ck_assert_msg(launched(&f->twins[i]) == (i == 1 || i == 2), "%zu", i);
    teardown(f);
}
END_TEST

START_TEST(on_one_thread_none_run_where_the_user_says_so) {
    fixture *f = setup(OF_FORWARD, 1);
    f->host->n_threads = 1;
    add(f, 100);
    add(f, 100);
    backward_all(f);
    step(f);
    fake_use(f->twins[0].tensor->param, false);
    ck_assert(launched(&f->twins[0]) && !launched(&f->twins[1]));
    teardown(f);
}
END_TEST

START_TEST(what_is_large_runs_at_its_own_first_use) {
    fixture *f = setup(OF_FORWARD, 1 << 20);
    twin *small = add(f, OF_SERIAL_ELEMENTS - 1);
    twin *large = add(f, OF_SERIAL_ELEMENTS);
    twin *next = add(f, 10);
    backward_all(f);
    step(f);
    fake_use(small->tensor->param, false);
    ck_assert(launched(small) && !launched(large) && !launched(next));
    fake_use(large->tensor->param, false);
    ck_assert(launched(large) && !launched(next));
    teardown(f);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("together");
    TCase *tests = tcase_create("together");
    tcase_add_test(tests, gradients_that_waited_run_in_one_launch);
    tcase_add_test(tests, those_that_lack_state_get_it);
    tcase_add_test(tests, a_failure_changes_nothing_and_says_where);
    tcase_add_test(tests, a_second_gradient_is_refused_and_changes_nothing);
    tcase_add_test(tests, what_is_exclusive_runs_by_itself);
    tcase_add_test(tests, the_host_is_told_whose_inputs_come_next);
    tcase_add_test(tests, neighbours_run_at_the_first_use_of_one_of_them);
    tcase_add_test(tests, on_one_thread_fewer_neighbours_run);
    tcase_add_test(tests, on_one_thread_none_run_where_the_user_says_so);
    tcase_add_test(tests, what_is_large_runs_at_its_own_first_use);
    suite_add_tcase(suite, tests);
    return run(suite);
}
