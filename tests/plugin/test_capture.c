/* SPDX-License-Identifier: BSD-3-Clause */
/* Graphs: while a stream is being captured, what happens there must be in the
 * graph whole, and nothing that happens once may get into it. */
#include <string.h>

#include "fake_device.h"
#include "fixture.h"

START_TEST(captured_step_launches_at_once) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = add_on_device(f, 100, 0);
    device.capture[1] = 7;
    device.current = 1;
    backward(t);
    step(f);
    ck_assert(launched(t));
    ck_assert_uint_eq(counts(f).in_flight, 0);
    ck_assert_int_eq(device.events, 0);
    device.capture[1] = 0;
    teardown(f);
}
END_TEST

static fixture *pending_before_capture(twin **t) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    *t = add_on_device(f, 100, 0);
    backward(*t);
    step(f);
    device.current = 1;
    device.capture[1] = 7;
    return f;
}

START_TEST(pending_update_met_in_a_capture_is_refused_and_stays) {
    twin *t;
    fixture *f = pending_before_capture(&t);
    ck_assert_int_eq(of_access(t->tensor->param, false), OF_ACCESS_FAILED);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "before the capture"));
    ck_assert_int_eq(device.launches, 0);
    ck_assert_uint_eq(counts(f).pending, 1);
    device.capture[1] = 0;
    teardown(f);
}
END_TEST

START_TEST(update_in_flight_met_in_a_capture_is_refused) {
    twin *t;
    fixture *f = pending_before_capture(&t);
    device.current = 0;
    fake_use(t->tensor->param, false);
    device.current = 1;
    ck_assert_int_eq(of_access(t->tensor->param, false), OF_ACCESS_FAILED);
    device.capture[1] = 0;
    teardown(f);
}
END_TEST

static void before_the_capture(void) {
    device.capture[1] = 0;
    device.current = 0;
}

static void begin_the_capture(void) {
    device.current = 1;
    device.capture[1] = 7;
}

START_TEST(flushed_and_done_before_the_capture_all_is_well) {
    twin *t;
    fixture *f = pending_before_capture(&t);
    before_the_capture();
    ck_assert_int_eq(of_plan_flush(f->plan), OF_OK);
    device.busy = false; /* the user synchronizes with the device */
    begin_the_capture();
    ck_assert_int_eq(of_access(t->tensor->param, false), OF_NOTHING_PENDING);
    ck_assert(!of_any_pending());
    device.capture[1] = 0;
    teardown(f);
}
END_TEST

/* Uses ask the device now and then only; the first one in a capture asks. */
START_TEST(used_between_flush_and_synchronizing_all_is_well) {
    twin *t;
    fixture *f = pending_before_capture(&t);
    before_the_capture();
    ck_assert_int_eq(of_plan_flush(f->plan), OF_OK);
    ck_assert_int_eq(of_access(t->tensor->param, false), OF_IN_FLIGHT);
    device.busy = false;
    begin_the_capture();
    ck_assert_int_eq(of_access(t->tensor->param, false), OF_NOTHING_PENDING);
    device.capture[1] = 0;
    teardown(f);
}
END_TEST

START_TEST(drained_before_the_capture_all_is_well) {
    twin *t;
    fixture *f = pending_before_capture(&t);
    before_the_capture();
    ck_assert_int_eq(of_plan_drain(f->plan), OF_OK);
    begin_the_capture();
    ck_assert_int_eq(of_access(t->tensor->param, false), OF_NOTHING_PENDING);
    device.capture[1] = 0;
    teardown(f);
}
END_TEST

/* Another thread trains meanwhile: what it has under way is no part of the graph. */
START_TEST(flush_inside_a_capture_launches_but_waits_for_nothing_outside) {
    twin *t;
    fixture *f = pending_before_capture(&t);
    ck_assert_int_eq(of_plan_flush(f->plan), OF_OK);
    ck_assert_int_eq(device.launches, 1);
    ck_assert_int_eq(device.last_stream, 0);
    ck_assert_int_eq(of_access(t->tensor->param, false), OF_ACCESS_FAILED);
    ck_assert(!device.spoiled);
    device.capture[1] = 0;
    teardown(f);
}
END_TEST

START_TEST(captured_backward_closes_inside_the_capture) {
    fixture *f = setup_on_device(OF_BACKWARD, 0);
    for (int i = 0; i < 3; i++)
        add_on_device(f, 100, 0);
    device.current = 1;
    device.capture[1] = 9;
    for (int i = 2; i >= 0; i--)
        gradient(f, &f->twins[i]);
    ck_assert_uint_eq(counts(f).created, 0);
    ck_assert_int_eq(end_pass(f), OF_OK);
    ck_assert_int_eq(device.launches, 1);
    ck_assert_uint_eq(counts(f).in_flight, 0);
    step(f);
    device.capture[1] = 0;
    teardown(f);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("capture");
    TCase *tcase = tcase_create("capture");
    tcase_add_test(tcase, captured_step_launches_at_once);
    tcase_add_test(tcase, pending_update_met_in_a_capture_is_refused_and_stays);
    tcase_add_test(tcase, update_in_flight_met_in_a_capture_is_refused);
    tcase_add_test(tcase, flushed_and_done_before_the_capture_all_is_well);
    tcase_add_test(tcase, used_between_flush_and_synchronizing_all_is_well);
    tcase_add_test(tcase, drained_before_the_capture_all_is_well);
    tcase_add_test(tcase, flush_inside_a_capture_launches_but_waits_for_nothing_outside);
    tcase_add_test(tcase, captured_backward_closes_inside_the_capture);
    suite_add_tcase(suite, tcase);
    return run(suite);
}
