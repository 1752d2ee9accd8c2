/* SPDX-License-Identifier: BSD-3-Clause */
/* Backward fusion on a device: small gradients wait, as on the CPU (test_passes.c), and are updated
 * together. */
#include <string.h>

#include "fake_device.h"
#include "fixture.h"

enum { BUCKET = 4000 }; /* bytes: 1000 float32 elements */

static fixture *with_bucket(void) {
    return setup_on_device(OF_BACKWARD, BUCKET);
}

static twin *add_there(fixture *f, int64_t numel) {
    return add_on_device(f, numel, 0);
}

START_TEST(bucket_is_launched_when_it_is_full_in_one_go) {
    fixture *f = with_bucket();
    for (int i = 0; i < 4; i++)
        add_there(f, 300);
    for (size_t i = 0; i < 3; i++) {
        gradient(f, &f->twins[i]);
        ck_assert(counts(f).created == 0 && !of_any_pending());
        ck_assert_ptr_nonnull(f->twins[i].tensor->grad);
    }
    gradient(f, &f->twins[3]);
    for (size_t i = 0; i < 4; i++)
        ck_assert(launched(&f->twins[i]));
    of_counts c = counts(f);
    ck_assert_uint_eq(c.pending, 0);
    ck_assert_uint_eq(c.launches, 1);
    ck_assert_uint_eq(c.at_close, 4);
    step(f);
    teardown(f);
}
END_TEST

START_TEST(bucket_is_full_at_its_limit_exactly) {
    fixture *f = with_bucket();
    twin *a = add_there(f, 999);
    twin *b = add_there(f, 1);
    gradient(f, a);
    ck_assert(!launched(a));
    gradient(f, b);
    ck_assert(launched(a) && launched(b));
    teardown(f);
}
END_TEST

START_TEST(no_update_is_deferred) {
    fixture *f = with_bucket();
    twin *a = add_there(f, 600);
    twin *b = add_there(f, 600);
    fake_record(f->host);
    gradient(f, a);
    gradient(f, b);
    ck_assert_str_eq(fake_events(f->host), "collect:0 collect:1 commit:0 commit:1 settle:0 "
                                           "settle:1 release:0 release:1");
    teardown(f);
}
END_TEST

START_TEST(large_update_takes_along_what_waits) {
    fixture *f = with_bucket();
    twin *small = add_there(f, 10);
    twin *large = add_there(f, 1000);
    gradient(f, small);
    gradient(f, large);
    ck_assert(launched(large) && launched(small));
    ck_assert_uint_eq(counts(f).launches, 1);
    teardown(f);
}
END_TEST

START_TEST(without_buckets_every_update_goes_alone) {
    fixture *f = setup(OF_BACKWARD, OF_BUCKET_NONE);
    for (int i = 0; i < 3; i++) {
        twin *t = add(f, i * 5);
        gradient(f, t);
        ck_assert(launched(t));
    }
    ck_assert_uint_eq(counts(f).launches, 3);
    teardown(f);
}
END_TEST

START_TEST(use_of_a_parameter_whose_gradient_waits_launches_nothing) {
    fixture *f = with_bucket();
    twin *a = add_there(f, 400);
    twin *b = add_there(f, 600);
    gradient(f, a);
    fake_use(a->tensor->param, false);
    ck_assert(!launched(a));
    gradient(f, b);
    ck_assert(launched(a) && launched(b));
    teardown(f);
}
END_TEST

START_TEST(end_launches_what_waits) {
    fixture *f = with_bucket();
    twin *t = add_there(f, 10);
    gradient(f, t);
    ck_assert(!launched(t));
    ck_assert_int_eq(end_pass(f), OF_OK);
    ck_assert(launched(t));
    teardown(f);
}
END_TEST

START_TEST(on_the_cpu_nothing_joins_a_bucket) {
    fixture *f = setup(OF_BACKWARD, BUCKET);
    twin *t = add(f, 10);
    gradient(f, t);
    ck_assert_uint_eq(counts(f).pending, 0);
    ck_assert(!of_any_pending() && !launched(t));
    ck_assert_int_eq(end_pass(f), OF_OK);
    ck_assert(launched(t));
    teardown(f);
}
END_TEST

START_TEST(step_confirms) {
    fixture *f = with_bucket();
    twin *t = add_there(f, 10);
    gradient(f, t);
    ck_assert(!of_plan_unconfirmed(f->plan));
    ck_assert_int_eq(end_pass(f), OF_OK);
    ck_assert(of_plan_unconfirmed(f->plan));
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
    ck_assert(launched(t));
    ck_assert(!of_plan_unconfirmed(f->plan));
    ck_assert_uint_eq(counts(f).created, 1);
    for (int i = 0; i < 50; i++) {
        gradient(f, t);
        ck_assert_int_eq(end_pass(f), OF_OK);
        ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
        check_twin(t);
    }
    teardown(f);
}
END_TEST

START_TEST(step_updates_gradients_set_by_hand) {
    fixture *f = setup(OF_BACKWARD, BUCKET);
    twin *hooked = add(f, 10);
    twin *by_hand = add(f, 10);
    gradient(f, hooked);
    backward(by_hand);
    expect_update(f, by_hand);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
    ck_assert(launched(hooked) && launched(by_hand));
    ck_assert(!of_any_pending());
    ck_assert_ptr_null(by_hand->tensor->grad);
    teardown(f);
}
END_TEST

START_TEST(second_gradient_before_step_is_refused_and_changes_nothing) {
    fixture *f = with_bucket();
    twin *t = add_there(f, 10);
    gradient(f, t);
    ck_assert_int_eq(end_pass(f), OF_OK);
    backward(t);
    ck_assert_int_eq(ready(f, t->slot), OF_TWICE);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "step()"));
    ck_assert_ptr_nonnull(strstr(of_error_message(), "mode=\"forward\""));
    ck_assert_uint_eq(counts(f).created, 1);
    fake_set_grad(t->tensor, NULL);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
    gradient(f, t);
    teardown(f);
}
END_TEST

START_TEST(step_leaves_alone_what_backward_updated) {
    fixture *f = with_bucket();
    twin *t = add_there(f, 10);
    gradient(f, t);
    ck_assert_int_eq(end_pass(f), OF_OK);
    backward(t);
    ck_assert_int_eq(ready(f, t->slot), OF_TWICE);
    fake_record(f->host);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
    ck_assert_str_eq(fake_events(f->host), "");
    teardown(f);
}
END_TEST

START_TEST(hyper_parameters_are_those_of_the_moment_of_the_gradient) {
    fixture *f = with_bucket();
    twin *before = add_there(f, 10);
    twin *after = add_there(f, 10);
    gradient(f, before);
    ck_assert_int_eq(end_pass(f), OF_OK);
    set_lr(f, 0, 0.5);
    gradient(f, after);
    ck_assert_int_eq(end_pass(f), OF_OK);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
    teardown(f);
}
END_TEST

START_TEST(host_that_starts_over_can_say_what_was_updated) {
    fixture *f = with_bucket();
    twin *a = add_there(f, 10);
    twin *b = add_there(f, 10);
    ck_assert(!of_plan_is_updated(f->plan, a->slot));
    of_plan_set_updated(f->plan, a->slot);
    of_plan_set_updated(f->plan, a->slot); /* counts once */
    of_plan_set_updated(f->plan, 99);      /* no such slot */
    ck_assert(of_plan_is_updated(f->plan, a->slot) && of_plan_unconfirmed(f->plan));
    ck_assert(!of_plan_is_updated(f->plan, b->slot) && !of_plan_is_updated(f->plan, 99));
    backward(a);
    ck_assert_int_eq(ready(f, a->slot), OF_TWICE);
    backward(b);
    expect_update(f, b);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
    ck_assert(!of_plan_unconfirmed(f->plan) && !of_plan_is_updated(f->plan, a->slot));
    teardown(f);
}
END_TEST

START_TEST(missing_state_is_made_and_errors_are_reported_and_change_nothing) {
    fixture *f = with_bucket();
    twin *t = add_there(f, 1000);
    t->tensor->lacks_state = true;
    backward(t);
    size_t at = 0;
    of_pass *pass = f->pass = begin_pass(f);
    f->host->refuses = true;
    ck_assert_int_eq(of_pass_ready(pass, t->slot, &at), OF_REFUSED);
    ck_assert_str_eq(of_error_message(), "no state for slot 0");
    ck_assert_uint_eq(at, OF_NO_SLOT);
    f->host->refuses = false;
    t->tensor->broken = true;
    ck_assert_int_eq(of_pass_ready(pass, t->slot, &at), OF_INVALID);
    ck_assert_str_eq(of_error_message(), "tensor 0 is broken");
    ck_assert_uint_eq(at, t->slot);
    ck_assert(!of_plan_unconfirmed(f->plan));
    t->tensor->broken = false;
    gradient(f, t);
    ck_assert_int_eq(atomic_load(&f->host->made), 1);
    teardown(f);
}
END_TEST

START_TEST(failed_step_keeps_what_backward_updated) {
    fixture *f = with_bucket();
    twin *a = add_there(f, 10);
    twin *b = add_there(f, 10);
    gradient(f, a);
    ck_assert_int_eq(end_pass(f), OF_OK);
    backward(b);
    b->tensor->broken = true;
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_INVALID);
    ck_assert(of_plan_unconfirmed(f->plan));
    b->tensor->broken = false;
    expect_update(f, b);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
    ck_assert(!of_plan_unconfirmed(f->plan));
    teardown(f);
}
END_TEST

START_TEST(hook_without_gradient_is_nothing) {
    fixture *f = with_bucket();
    twin *t = add_there(f, 10);
    ck_assert_int_eq(ready(f, t->slot), OF_OK);
    ck_assert(!of_plan_unconfirmed(f->plan));
    teardown(f);
}
END_TEST

START_TEST(aliased_parameters_share_no_bucket) {
    fixture *f = with_bucket();
    twin *a = add_there(f, 100);
    twin *b = add_tensor(f, fake_tensor_alias(a->tensor), 0, false);
    b->tensor->device = OF_CUDA;
    for (int i = 0; i < 3; i++) {
        void *state[] = {b->state[0], b->state[1]};
        gradient(f, a);
        backward(b);
        expect_update_at(b, a->param, state);
        ck_assert_int_eq(ready(f, b->slot), OF_OK);
        ck_assert_int_eq(end_pass(f), OF_OK);
        ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
    }
    memcpy(b->param, a->param, a->tensor->param->bytes);
    teardown(f);
}
END_TEST

START_TEST(gradient_needs_backward_mode_and_a_slot) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    of_pass *pass = (of_pass *)&f;
    bool first = true;
    size_t at = 0;
    add(f, 10);
    ck_assert_int_eq(of_pass_begin(f->plan, 1, &pass, &first), OF_INVALID);
    ck_assert(!pass && !first);
    teardown(f);
    f = setup(OF_BACKWARD, 0);
    add(f, 10);
    ck_assert_int_eq(of_pass_begin(f->plan, OF_NO_TOKEN, &pass, &first), OF_INVALID);
    f->pass = begin_pass(f);
    ck_assert_int_eq(of_pass_ready(f->pass, 1, &at), OF_INVALID);
    ck_assert_str_eq(of_error_message(), "there is no slot 1: the plan has 1");
    teardown(f);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("backward fusion");
    TCase *bucket = tcase_create("bucket");
    tcase_add_test(bucket, bucket_is_launched_when_it_is_full_in_one_go);
    tcase_add_test(bucket, bucket_is_full_at_its_limit_exactly);
    tcase_add_test(bucket, no_update_is_deferred);
    tcase_add_test(bucket, large_update_takes_along_what_waits);
    tcase_add_test(bucket, without_buckets_every_update_goes_alone);
    tcase_add_test(bucket, use_of_a_parameter_whose_gradient_waits_launches_nothing);
    tcase_add_test(bucket, end_launches_what_waits);
    tcase_add_test(bucket, on_the_cpu_nothing_joins_a_bucket);
    tcase_add_test(bucket, aliased_parameters_share_no_bucket);
    suite_add_tcase(suite, bucket);
    TCase *stepping = tcase_create("step");
    tcase_add_test(stepping, step_confirms);
    tcase_add_test(stepping, step_updates_gradients_set_by_hand);
    tcase_add_test(stepping, second_gradient_before_step_is_refused_and_changes_nothing);
    tcase_add_test(stepping, step_leaves_alone_what_backward_updated);
    tcase_add_test(stepping, hyper_parameters_are_those_of_the_moment_of_the_gradient);
    tcase_add_test(stepping, failed_step_keeps_what_backward_updated);
    tcase_add_test(stepping, host_that_starts_over_can_say_what_was_updated);
    suite_add_tcase(suite, stepping);
    TCase *refusals = tcase_create("refusals");
    tcase_add_test(refusals, missing_state_is_made_and_errors_are_reported_and_change_nothing);
    tcase_add_test(refusals, hook_without_gradient_is_nothing);
    tcase_add_test(refusals, gradient_needs_backward_mode_and_a_slot);
    suite_add_tcase(suite, refusals);
    return run(suite);
}
