/* SPDX-License-Identifier: BSD-3-Clause */
/* Graphs: while a stream is being captured, what happens there must be in the
 * graph whole, and nothing that happens once may get into it. */
#include "fake_device.h"

static void capture(void) {
    device.current = 1;
    device.capture[1] = 7;
}

static void stop_capturing(void) {
    device.capture[1] = 0;
    device.current = 0;
}

ON_DEVICE(captured_step_launches_at_once, OF_FORWARD, 0) {
    capture();
    ck_assert(launched(updated_on_device(f, 100)));
    ck_assert_uint_eq(counts(f).in_flight, 0);
    ck_assert_int_eq(device.events, 0);
}

ON_DEVICE(captured_backward_closes_inside_the_capture, OF_BACKWARD, 0) {
    add_some_on_device(f, 3, 100);
    capture();
    for (int i = 2; i >= 0; i--)
        gradient(f, &f->twins[i]);
    ck_assert_uint_eq(counts(f).created, 0);
    OK(end_pass(f));
    ck_assert_int_eq(device.launches, 1);
    ck_assert_uint_eq(counts(f).in_flight, 0);
    step(f);
}

/* A scaling that is pending, and then a capture. */
static fixture *pending_before_capture(void) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    scaled_on_device(f, 100);
    capture();
    return f;
}

#define PENDING_BEFORE(name) WITH(name, pending_before_capture(), teardown_on_device)

static of_accessed use(const fixture *f) {
    return of_access(f->twins[0].tensor->grad, false);
}

PENDING_BEFORE(what_is_pending_is_refused_in_a_capture_and_stays) {
    FAILS(OF_ACCESS_FAILED, use(f), "before the capture");
    ck_assert_int_eq(device.launches, 0);
    ck_assert(of_is_scaled(f->twins[0].tensor->grad));
}

PENDING_BEFORE(what_is_in_flight_is_refused_in_a_capture) {
    device.current = 0;
    look_at_gradient(&f->twins[0]);
    device.current = 1;
    ck_assert_int_eq(use(f), OF_ACCESS_FAILED);
}

PENDING_BEFORE(flushed_and_done_before_the_capture_all_is_well) {
    stop_capturing();
    OK(of_plan_flush(f->plan));
    device.busy = false; /* the user synchronizes with the device */
    capture();
    ck_assert_int_eq(use(f), OF_NOTHING_PENDING);
    ck_assert(!of_any_pending());
}

/* Uses ask the device now and then only; the first one in a capture asks. */
PENDING_BEFORE(used_between_flush_and_synchronizing_all_is_well) {
    stop_capturing();
    OK(of_plan_flush(f->plan));
    ck_assert_int_eq(use(f), OF_IN_FLIGHT);
    device.busy = false;
    capture();
    ck_assert_int_eq(use(f), OF_NOTHING_PENDING);
}

PENDING_BEFORE(drained_before_the_capture_all_is_well) {
    stop_capturing();
    OK(of_plan_drain(f->plan));
    capture();
    ck_assert_int_eq(use(f), OF_NOTHING_PENDING);
}

/* Another thread trains meanwhile: what it has under way is no part of the graph. */
PENDING_BEFORE(flush_inside_a_capture_launches_but_waits_for_nothing_outside) {
    OK(of_plan_flush(f->plan));
    ck_assert_int_eq(device.launches, 1);
    ck_assert_int_eq(device.last_stream, 0);
    ck_assert_int_eq(use(f), OF_ACCESS_FAILED);
    ck_assert(!device.spoiled);
}
