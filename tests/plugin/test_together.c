/* SPDX-License-Identifier: BSD-3-Clause */
/* Small updates on the CPU that run together: gradients that backward fusion has let
 * wait for each other, and neighbours of what is used in forward fusion. */
#include "fixture.h"

enum { BUCKET = 4000 }; /* bytes: 1000 float32 elements */

static of_status gradients(fixture *f, const size_t *slots, size_t n, size_t *which,
                           size_t *n_which) {
    return of_plan_gradients(f->plan, slots, n, which, n_which);
}

static fixture *three(void) {
    fixture *f = setup(OF_BACKWARD, OF_BUCKET_NONE);
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
    fixture *f = setup(OF_BACKWARD, OF_BUCKET_NONE);
    size_t which[3], n = 9;
    for (int i = 0; i < 4; i++)
        add(f, 700 * i);
    for (int step = 0; step < 3; step++) {
        backward_of(f, slots, 3);
        ck_assert_int_eq(gradients(f, slots, 3, which, &n), OF_OK);
        ck_assert_uint_eq(n, 0);
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

START_TEST(all_that_lack_state_are_named) {
    static const size_t slots[] = {0, 1, 2};
    fixture *f = three();
    size_t which[3], n = 0;
    f->twins[0].tensor->lacks_state = f->twins[2].tensor->lacks_state = true;
    backward_all(f);
    ck_assert_int_eq(gradients(f, slots, 3, which, &n), OF_NEEDS_STATE);
    ck_assert(n == 2 && which[0] == 0 && which[1] == 2);
    ck_assert(!of_plan_unconfirmed(f->plan) && launched(&f->twins[1]));
    f->twins[0].tensor->lacks_state = f->twins[2].tensor->lacks_state = false;
    for (size_t i = 0; i < 3; i++)
        expect_update(f, &f->twins[i]);
    ck_assert_int_eq(gradients(f, slots, 3, which, &n), OF_OK);
    teardown(f);
}
END_TEST

START_TEST(a_failure_changes_nothing_and_says_where) {
    static const size_t slots[] = {0, 1, 2};
    fixture *f = three();
    size_t which[3], n = 0;
    backward_all(f);
    f->twins[1].tensor->broken = true;
    ck_assert_int_eq(gradients(f, slots, 3, which, &n), OF_INVALID);
    ck_assert_str_eq(of_error_message(), "tensor 1 is broken");
    ck_assert(n == 1 && which[0] == 1);
    f->twins[1].tensor->broken = false;
    ck_assert(!of_plan_unconfirmed(f->plan) && counts(f).created == 0);
    teardown(f);
}
END_TEST

START_TEST(a_second_gradient_is_refused_and_changes_nothing) {
    static const size_t slots[] = {0, 1}, again[] = {2, 1}, twice[] = {2, 2};
    fixture *f = three();
    size_t which[2], n = 0;
    backward_of(f, slots, 2);
    ck_assert_int_eq(gradients(f, slots, 2, which, &n), OF_OK);
    backward(&f->twins[1]);
    backward(&f->twins[2]);
    ck_assert_int_eq(gradients(f, again, 2, which, &n), OF_TWICE);
    ck_assert(n == 1 && which[0] == 1 && !of_plan_is_updated(f->plan, 2));
    ck_assert_int_eq(gradients(f, twice, 2, which, &n), OF_TWICE);
    ck_assert(n == 1 && which[0] == 2 && !of_plan_is_updated(f->plan, 2));
    ck_assert(of_plan_is_updated(f->plan, 1) && counts(f).created == 2);
    teardown(f);
}
END_TEST

START_TEST(other_modes_and_slots_are_refused) {
    static const size_t slots[] = {0, 1};
    size_t which[2], n = 0;
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    add(f, 10);
    ck_assert_int_eq(gradients(f, slots, 1, which, &n), OF_INVALID);
    teardown(f);
    f = setup(OF_BACKWARD, OF_BUCKET_NONE);
    add(f, 10);
    ck_assert_int_eq(gradients(f, slots, 2, which, &n), OF_INVALID);
    ck_assert_str_eq(of_error_message(), "there is no slot 1: the plan has 1");
    teardown(f);
}
END_TEST

START_TEST(what_is_alone_is_left_to_a_call_of_its_own) {
    static const size_t slots[] = {0, 1, 2};
    fixture *f = three();
    size_t which[3], n = 0;
    f->twins[1].tensor->alone = true;
    backward_of(f, slots, 3);
    ck_assert_int_eq(gradients(f, slots, 3, which, &n), OF_OK);
    ck_assert(n == 1 && which[0] == 1 && !of_plan_is_updated(f->plan, 1));
    ck_assert_int_eq(of_plan_gradient(f->plan, 1), OF_OK);
    ck_assert_uint_eq(counts(f).at_close, 2);
    ck_assert_uint_eq(counts(f).at_once, 1);
    teardown(f);
}
END_TEST

START_TEST(the_host_is_told_whose_inputs_come_next) {
    enum { N = 40, CHOSEN = 34 };
    fixture *f = setup(OF_BACKWARD, OF_BUCKET_NONE);
    size_t slots[CHOSEN], which[CHOSEN], n = 0;
    for (int i = 0; i < N; i++)
        add(f, 10);
    for (size_t i = 0; i < CHOSEN; i++)
        slots[i] = CHOSEN - i;
    backward_of(f, slots, CHOSEN);
    ck_assert_int_eq(gradients(f, slots, CHOSEN, which, &n), OF_OK);
    for (size_t i = 0; i < N; i++)
        ck_assert_int_eq(f->twins[i].tensor->expected, i >= 1 && i <= CHOSEN);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
    for (size_t i = 0; i < N; i++) /* 0 is alone among those that come with it */
        ck_assert_int_eq(f->twins[i].tensor->expected, i >= 1);
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

START_TEST(on_one_thread_neighbours_wait_for_their_own_first_use) {
    fixture *f = setup(OF_FORWARD, BUCKET);
    f->host->n_threads = 1;
    for (int i = 0; i < 3; i++)
        add(f, 100);
    backward_all(f);
    step(f);
    fake_use(f->twins[1].tensor->param, false);
    ck_assert(!launched(&f->twins[0]) && launched(&f->twins[1]) && !launched(&f->twins[2]));
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
    tcase_add_test(tests, all_that_lack_state_are_named);
    tcase_add_test(tests, a_failure_changes_nothing_and_says_where);
    tcase_add_test(tests, a_second_gradient_is_refused_and_changes_nothing);
    tcase_add_test(tests, other_modes_and_slots_are_refused);
    tcase_add_test(tests, what_is_alone_is_left_to_a_call_of_its_own);
    tcase_add_test(tests, the_host_is_told_whose_inputs_come_next);
    tcase_add_test(tests, neighbours_run_at_the_first_use_of_one_of_them);
    tcase_add_test(tests, on_one_thread_neighbours_wait_for_their_own_first_use);
    tcase_add_test(tests, what_is_large_runs_at_its_own_first_use);
    suite_add_tcase(suite, tests);
    return run(suite);
}
