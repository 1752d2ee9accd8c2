/* SPDX-License-Identifier: BSD-3-Clause */
/* A device whose functions fail: nobody is told that it has done what it may still be at,
 * and other streams go on waiting for it. */
#include <string.h>

#include "fake_device.h"
#include "fixture.h"

/* One update in flight on stream 0, for which stream 1 has not waited. */
static fixture *with_update_in_flight(void) {
    fixture *f = setup_on_device(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add_on_device(f, 100, 0);
    fake_timeline_wait(&device.timeline, 1, 0);
    backward(t);
    step(f);
    fake_operator(t->tensor->param, false, "use");
    ck_assert_uint_eq(counts(f).in_flight, 1);
    return f;
}

static void repair(void) {
    device.fails_to_record = device.fails_to_synchronize = false;
}

static void stream_1_uses(fake_buffer *buffer) {
    device.current = 1;
    fake_operator(buffer, true, "use on another stream");
    ck_assert_msg(device.timeline.races == 0, "%s", device.timeline.first_race);
}

static void drain_fails(fixture *f) {
    ck_assert_int_eq(of_plan_drain(f->plan), OF_REFUSED);
    ck_assert_uint_eq(counts(f).in_flight, 1);
    ck_assert(of_any_pending());
}

START_TEST(a_drain_that_could_not_wait_says_so_and_forgets_nothing) {
    fixture *f = with_update_in_flight();
    device.fails_to_record = true;
    drain_fails(f);
    ck_assert_str_eq(of_error_message(), "stream 0 is broken");
    repair();
    device.fails_to_synchronize = true;
    drain_fails(f);
    ck_assert_str_eq(of_error_message(), "the device is broken");
    repair();
    stream_1_uses(f->twins[0].tensor->param);
    ck_assert_int_eq(of_plan_drain(f->plan), OF_OK);
    ck_assert_uint_eq(counts(f).in_flight, 0);
    teardown(f);
    ck_assert_int_eq(device.events, 0);
}
END_TEST

/* As a module that is moved to another device, or load_state_dict(), has it done. */
START_TEST(a_plan_that_is_cleared_meanwhile_forgets_nothing) {
    fixture *f = with_update_in_flight();
    fake_tensor *tensor = f->twins[0].tensor;
    device.fails_to_record = true;
    of_plan_clear(f->plan);
    ck_assert_uint_eq(counts(f).in_flight, 1);
    repair();
    stream_1_uses(tensor->param);
    of_plan_drain(f->plan);
    teardown_unchecked(f);
    ck_assert(!of_any_pending());
}
END_TEST

START_TEST(a_product_that_could_not_be_made_at_once_is_an_error) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = add_on_device(f, 100, 0);
    bool scaled = false;
    const float factor = 0.3f;
    backward(t);
    t->tensor->factor = fake_buffer_new(sizeof factor);
    memcpy(t->tensor->factor->data, &factor, sizeof factor);
    t->tensor->shared = true;
    device.fail_launch = 1;
    ck_assert_int_eq(of_plan_scale(f->plan, t->slot, 0, 0, &scaled), OF_REFUSED);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "the device is broken"));
    fake_buffer_release(t->tensor->factor);
    teardown_unchecked(f);
}
END_TEST

/* Comes last: the plan stays, because streams may still have to wait for it. */
START_TEST(a_plan_that_dies_meanwhile_is_still_waited_for) {
    fixture *f = with_update_in_flight();
    fake_buffer *param = f->twins[0].tensor->param;
    fake_buffer_retain(param);
    device.fails_to_record = true;
    teardown_unchecked(f);
    repair();
    stream_1_uses(param);
    fake_buffer_release(param);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("device-errors");
    TCase *tests = tcase_create("device-errors");
    tcase_add_test(tests, a_drain_that_could_not_wait_says_so_and_forgets_nothing);
    tcase_add_test(tests, a_plan_that_is_cleared_meanwhile_forgets_nothing);
    tcase_add_test(tests, a_product_that_could_not_be_made_at_once_is_an_error);
    tcase_add_test(tests, a_plan_that_dies_meanwhile_is_still_waited_for);
    suite_add_tcase(suite, tests);
    return run(suite);
}
