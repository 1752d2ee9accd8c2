/* SPDX-License-Identifier: BSD-3-Clause */
/* Forward fusion: what step() collects, refuses and takes a snapshot of. */
#include <string.h>

#include "fixture.h"

START_TEST(life_of_an_update_in_order) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *a = add(f, 10);
    add(f, 10)->tensor->shared = true;
    backward_all(f);
    fake_record(f->host);
    step(f);
    ck_assert_str_eq(fake_events(f->host), "collect:0 collect:1 commit:0 commit:1 defer:0 refuse:1 "
                                           "settle:1 release:1");
    fake_use(a->tensor->param, false);
    ck_assert_str_eq(fake_events(f->host), "settle:0 release:0");
    teardown(f);
}
END_TEST

START_TEST(step_again_launches_what_is_still_pending_first) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 100);
    for (int i = 0; i < 5; i++) {
        backward(t);
        step(f);
    }
    ck_assert_uint_eq(counts(f).at_close, 4);
    ck_assert_uint_eq(counts(f).pending, 1);
    teardown(f);
}
END_TEST

START_TEST(step_again_with_the_same_gradient_applies_it_twice) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 100);
    backward(t);
    step(f);
    step(f);
    check_twin(t);
    ck_assert_uint_eq(counts(f).created, 2);
    teardown(f);
}
END_TEST

/* Whether the last step() came with the inputs of the one before it. */
static bool came_again(fixture *f, twin *t) {
    const int before = t->tensor->again;
    backward(t);
    step(f);
    return t->tensor->again != before;
}

START_TEST(inputs_come_again_as_the_last_update_left_them) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *a = add(f, 10);
    twin *b = add(f, 10);
    ck_assert(!came_again(f, a));
    ck_assert(came_again(f, a));
    ck_assert(!came_again(f, b));
    ck_assert(came_again(f, a));
    ck_assert(came_again(f, b));
    teardown(f);
}
END_TEST

START_TEST(inputs_come_empty_where_collect_has_found_none) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 10);
    ck_assert(!came_again(f, t));
    fake_set_grad(t->tensor, NULL);
    step(f);
    ck_assert(!came_again(f, t));
    ck_assert(came_again(f, t));
    teardown(f);
}
END_TEST

START_TEST(inputs_of_another_kind_do_not_come_again) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 10);
    ck_assert(!came_again(f, t));
    t->tensor->exclusive = true;
    ck_assert(!came_again(f, t));
    ck_assert(!came_again(f, t));
    t->tensor->exclusive = false;
    ck_assert(!came_again(f, t));
    ck_assert(came_again(f, t));
    teardown(f);
}
END_TEST

START_TEST(inputs_of_backward_do_not_come_again_in_step) {
    fixture *f = setup(OF_BACKWARD, OF_BUCKET_NONE);
    twin *t = add(f, 10);
    for (int i = 0; i < 2; i++) {
        gradient(f, t);
        step(f);
    }
    ck_assert_int_eq(t->tensor->again, 1);
    ck_assert(!came_again(f, t));
    ck_assert(came_again(f, t));
    teardown(f);
}
END_TEST

static void set_amsgrad(fixture *f, double yes) {
    const of_rule *rule = of_plan_rule(f->plan);
    size_t i = 0;
    while (strcmp(rule->hyper[i], "amsgrad") != 0)
        i++;
    f->hyper[0][i] = yes;
    ck_assert_int_eq(of_plan_set_group(f->plan, 0, f->hyper[0], rule->n_hyper), OF_OK);
}

START_TEST(inputs_do_not_come_again_for_options_that_need_other_state) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 10);
    ck_assert(!came_again(f, t));
    set_amsgrad(f, 1);
    backward(t);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_INVALID);
    ck_assert_str_eq(of_error_message(), "the optimizer state 'max_exp_avg_sq' is missing");
    set_amsgrad(f, 0);
    ck_assert(!came_again(f, t));
    ck_assert(came_again(f, t));
    teardown(f);
}
END_TEST

START_TEST(inputs_that_come_again_are_checked) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 10);
    ck_assert(!came_again(f, t));
    t->tensor->mixed = true;
    backward(t);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_INVALID);
    t->tensor->mixed = false;
    ck_assert(!came_again(f, t));
    t->tensor->step = -1;
    backward(t);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_INVALID);
    ck_assert_int_eq(t->tensor->again, 1);
    ck_assert_str_eq(of_error_message(), "bad inputs of an update: 10 elements, 4 keys, step 0 "
                                         "(first is 1)");
    teardown_unchecked(f);
}
END_TEST

START_TEST(inputs_that_were_refused_do_not_come_again) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 10);
    t->tensor->step = -1;
    backward(t);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_INVALID);
    t->tensor->step = 0;
    ck_assert(!came_again(f, t));
    check_twin(t);
    teardown(f);
}
END_TEST

START_TEST(parameter_without_gradient_is_left_alone) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *a = add(f, 10);
    twin *b = add(f, 10);
    backward(b);
    step(f);
    ck_assert(!of_access(a->tensor->param, false));
    check_twin(b);
    teardown(f);
}
END_TEST

START_TEST(missing_state_is_reported_before_anything_changes) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    for (int i = 0; i < 4; i++)
        add(f, 10);
    backward_all(f);
    f->twins[1].tensor->lacks_state = f->twins[3].tensor->lacks_state = true;
    size_t needs[1] = {99};
    size_t n_needs = 0;
    fake_record(f->host);
    ck_assert_int_eq(of_plan_step(f->plan, needs, 1, &n_needs), OF_NEEDS_STATE);
    ck_assert_uint_eq(n_needs, 2);
    ck_assert_uint_eq(needs[0], f->twins[1].slot);
    ck_assert_str_eq(fake_events(f->host),
                     "collect:0 collect:1 collect:2 collect:3 release:0 release:2");
    ck_assert(!of_any_pending());
    f->twins[1].tensor->lacks_state = f->twins[3].tensor->lacks_state = false;
    step(f);
    teardown(f);
}
END_TEST

START_TEST(failed_step_changes_nothing) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    for (int i = 0; i < 3; i++)
        add(f, 10);
    backward_all(f);
    f->twins[0].tensor->lacks_state = true;
    f->twins[2].tensor->broken = true;
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_INVALID);
    ck_assert_str_eq(of_error_message(), "tensor 2 is broken");
    ck_assert(!of_any_pending());
    ck_assert_int_eq(atomic_load(&f->host->holds), 0);
    ck_assert_uint_eq(counts(f).created, 0);
    f->twins[0].tensor->lacks_state = f->twins[2].tensor->broken = false;
    step(f);
    teardown(f);
}
END_TEST

START_TEST(scalars_are_those_of_step_not_of_launch) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *a = add(f, 100);
    twin *b = add_to_group(f, 100, 1);
    backward_all(f);
    step(f);
    set_lr(f, 0, 0.5);
    set_lr(f, 1, 0.25);
    check_twin(a);
    check_twin(b);
    backward_all(f);
    step(f);
    ck_assert_double_eq(of_plan_hyper(f->plan, a->slot)[0], 0.5);
    ck_assert_double_eq(of_plan_hyper(f->plan, b->slot)[0], 0.25);
    teardown(f);
}
END_TEST

START_TEST(parameters_of_one_group_may_be_at_different_steps) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    for (int i = 0; i < 6; i++)
        add(f, 20);
    for (size_t round = 1; round < 6; round++) {
        for (size_t i = 0; i < f->n; i += round)
            backward(&f->twins[i]);
        step(f);
        for (size_t i = 0; i < f->n; i++)
            fake_set_grad(f->twins[i].tensor, NULL);
    }
    teardown(f);
}
END_TEST

START_TEST(collect_may_use_pending_memory_of_any_plan) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    fixture *g = setup_beside(f, OF_FORWARD);
    twin *a = add(f, 10);
    twin *b = add(g, 10);
    a->tensor->used_on_look = b->tensor->state[0];
    b->tensor->used_on_look = a->tensor->param;
    for (int i = 0; i < 3; i++) {
        backward(a);
        backward(b);
        step(f);
        step(g);
    }
    teardown(g);
    teardown(f);
}
END_TEST

START_TEST(host_may_keep_its_references_in_the_update) {
    for (int mode = OF_FORWARD; mode <= OF_BACKWARD; mode++) {
        fixture *f = setup((of_mode)mode, 0);
        f->host->holds_inside = true;
        for (int i = 0; i < 7; i++)
            add(f, 10)->tensor->shared = i == 2;
        for (int round = 0; round < 3; round++) {
            for (size_t i = 0; i < f->n && mode == OF_BACKWARD; i++)
                gradient(f, &f->twins[i]);
            if (mode == OF_FORWARD) {
                backward_all(f);
                step(f);
            } else
                ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
            check_twin(&f->twins[round]);
        }
        f->twins[3].tensor->lacks_state = true;
        backward_all(f);
        ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_NEEDS_STATE);
        teardown(f);
    }
}
END_TEST

START_TEST(release_may_flush_every_plan) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    f->host->flushes_on_release = true;
    for (int i = 0; i < 5; i++)
        add(f, 10)->tensor->shared = i == 2;
    for (int i = 0; i < 3; i++) {
        backward_all(f);
        step(f);
    }
    teardown(f);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("step");
    TCase *tests = tcase_create("step");
    tcase_add_test(tests, life_of_an_update_in_order);
    tcase_add_test(tests, step_again_launches_what_is_still_pending_first);
    tcase_add_test(tests, step_again_with_the_same_gradient_applies_it_twice);
    tcase_add_test(tests, inputs_come_again_as_the_last_update_left_them);
    tcase_add_test(tests, inputs_come_empty_where_collect_has_found_none);
    tcase_add_test(tests, inputs_of_another_kind_do_not_come_again);
    tcase_add_test(tests, inputs_of_backward_do_not_come_again_in_step);
    tcase_add_test(tests, inputs_do_not_come_again_for_options_that_need_other_state);
    tcase_add_test(tests, inputs_that_come_again_are_checked);
    tcase_add_test(tests, inputs_that_were_refused_do_not_come_again);
    tcase_add_test(tests, parameter_without_gradient_is_left_alone);
    tcase_add_test(tests, missing_state_is_reported_before_anything_changes);
    tcase_add_test(tests, failed_step_changes_nothing);
    tcase_add_test(tests, scalars_are_those_of_step_not_of_launch);
    tcase_add_test(tests, parameters_of_one_group_may_be_at_different_steps);
    tcase_add_test(tests, collect_may_use_pending_memory_of_any_plan);
    tcase_add_test(tests, host_may_keep_its_references_in_the_update);
    tcase_add_test(tests, release_may_flush_every_plan);
    suite_add_tcase(suite, tests);
    return run(suite);
}
