/* SPDX-License-Identifier: BSD-3-Clause */
/* A device whose functions fail: nobody is told that it has done what it may still be at,
 * and other streams go on waiting for it. */
#include "fake_device.h"

/* A scaling in flight on stream 0, for which stream 1 has not waited. */
static fixture *with_scaling_in_flight(void) {
    fixture *f = setup_on_device(OF_FORWARD, OF_BUCKET_NONE);
    fake_timeline_wait(&device.timeline, 1, 0);
    look_at_gradient(scaled_on_device(f, 100));
    ck_assert_uint_eq(counts(f).in_flight, 1);
    return f;
}

static void repair(void) {
    device.fails_to_record = device.fails_to_synchronize = false;
}

static void stream_1_uses(fake_buffer *buffer) {
    device.current = 1;
    fake_operator(buffer, true, "use on another stream");
    expect_no_race();
}

static void drain_fails(const fixture *f, const char *words) {
    FAILS(OF_REFUSED, of_plan_drain(f->plan), words);
    ck_assert_uint_eq(counts(f).in_flight, 1);
    ck_assert(of_any_pending());
    repair();
}

WITH(a_drain_that_could_not_wait_says_so_and_forgets_nothing, with_scaling_in_flight(),
     teardown_on_device) {
    device.fails_to_record = true;
    drain_fails(f, "stream 0 is broken");
    device.fails_to_synchronize = true;
    drain_fails(f, "the device is broken");
    stream_1_uses(f->twins[0].tensor->grad);
    OK(of_plan_drain(f->plan));
    ck_assert_uint_eq(counts(f).in_flight, 0);
}

/* As a module that is moved to another device, or load_state_dict(), has it done. */
TEST(a_plan_that_is_cleared_meanwhile_forgets_nothing) {
    fixture *f = with_scaling_in_flight();
    device.fails_to_record = true;
    of_plan_clear(f->plan);
    ck_assert_uint_eq(counts(f).in_flight, 1);
    repair();
    stream_1_uses(f->twins[0].tensor->grad);
    of_plan_drain(f->plan);
    fake_buffer_release(f->twins[0].tensor->factor);
    teardown_unchecked(f);
    ck_assert(!of_any_pending());
}

/* Comes last: the plan stays, because streams may still have to wait for it. */
TEST(a_plan_that_dies_meanwhile_is_still_waited_for) {
    fixture *f = with_scaling_in_flight();
    fake_buffer *grad = f->twins[0].tensor->grad, *factor = f->twins[0].tensor->factor;
    fake_buffer_retain(grad);
    device.fails_to_record = true;
    teardown_unchecked(f);
    repair();
    stream_1_uses(grad);
    fake_buffer_release(grad);
    fake_buffer_release(factor);
}
