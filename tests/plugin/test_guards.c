/* SPDX-License-Identifier: BSD-3-Clause */
/* Guards: with one switched off the same scenario gives wrong numbers, so the
 * tests that pass with it on prove something. Built twice: in the library that
 * people get, the switch must do nothing. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fake_device.h"
#include "fixture.h"

#ifdef OF_TEST_GUARDS
static const bool switchable = true;
#else
static const bool switchable = false;
#endif

static void guard_off(const char *name) {
    setenv("OPTFUSE_TEST_GUARDS_OFF", name, 1);
}

static void guards_on(void) {
    unsetenv("OPTFUSE_TEST_GUARDS_OFF");
}

/* Runs the scenario with all guards on, with others off, and with this one. */
static void check_guard(const char *name, bool (*right)(void)) {
    guards_on();
    ck_assert_msg(right(), "wrong with all guards on");
    guard_off("other,others");
    ck_assert_msg(right(), "wrong with another guard off");
    guard_off(name);
    ck_assert_msg(right() != switchable, "guard %s %s", name,
                  switchable ? "can be off without harm" : "can be switched off");
    char list[64] = "other,";
    strcat(list, name);
    guard_off(list);
    ck_assert_msg(right() != switchable, "guard %s in a list", name);
    guards_on();
}

static bool finish(fixture *f) {
    of_plan_flush(f->plan);
    bool right = true;
    for (size_t i = 0; i < f->n; i++)
        right = right && launched(&f->twins[i]);
    teardown_unchecked(f);
    return right;
}

/* Two steps without a use in between: the first must run first. */
static bool two_steps_are_in_order(void) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 100);
    for (int i = 0; i < 2; i++) {
        backward(t);
        step(f);
    }
    fake_use(t->tensor->param, false);
    return finish(f);
}

static bool two_optimizers_are_in_order(void) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    fixture *g = setup_beside(f, OF_FORWARD);
    twin *a = add(f, 100);
    twin *b = add_tensor(g, fake_tensor_alias(a->tensor), 1, false);
    void *state[] = {b->state[0], b->state[1]};
    backward(a);
    backward(b);
    step(f);
    expect_update_at(b, a->param, state);
    of_plan_step(g->plan, NULL, 0, NULL);
    memcpy(b->param, a->param, a->tensor->param->bytes);
    fake_use(b->tensor->param, false);
    bool right = finish(g);
    return finish(f) && right;
}

START_TEST(rearm) {
    check_guard("rearm", two_steps_are_in_order);
    check_guard("rearm", two_optimizers_are_in_order);
}
END_TEST

static bool second_gradient_is_not_applied(void) {
    fixture *f = setup(OF_BACKWARD, OF_BUCKET_NONE);
    twin *t = add(f, 100);
    gradient(f, t);
    backward(t);
    ready(f, t->slot);
    return finish(f);
}

START_TEST(twice) {
    check_guard("twice", second_gradient_is_not_applied);
}
END_TEST

/* A foreign thread that read the parameter once reads it again, now without
 * looking for a mark. */
static bool foreign_reader_sees_the_next_update(void) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 100);
    backward(t);
    step(f);
    fake_use(t->tensor->param, true);
    backward(t);
    step(f);
    bool right = launched(t);
    finish(f);
    return right;
}

START_TEST(foreign) {
    check_guard("foreign", foreign_reader_sees_the_next_update);
}
END_TEST

static bool cleared_plan_has_updated(void) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 100);
    backward(t);
    step(f);
    of_plan_clear(f->plan);
    return finish(f);
}

static bool released_plan_has_updated(void) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 100);
    backward(t);
    step(f);
    of_plan_release(f->plan);
    f->plan = NULL;
    bool right = launched(t);
    teardown_unchecked(f);
    return right;
}

START_TEST(clear) {
    check_guard("clear", cleared_plan_has_updated);
    check_guard("clear", released_plan_has_updated);
}
END_TEST

static bool all_is_launched_before_a_fork(void) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 100);
    backward(t);
    step(f);
    of_fork_prepare();
    bool right = launched(t); /* what a child would get a copy of */
    of_fork_parent();
    finish(f);
    return right;
}

START_TEST(fork_) {
    check_guard("fork", all_is_launched_before_a_fork);
}
END_TEST

static bool clipped_update_is_smaller(void) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 3000);
    bool scaled = false;
    backward(t);
    of_plan_scale(f->plan, t->slot, 0.25, NAN, &scaled);
    float *gradient = (float *)(void *)t->tensor->grad->data;
    for (int i = 0; i < 3000; i++) /* a product by 0.25 and one by 4 are exact */
        gradient[i] *= 0.25f;
    expect_update(f, t);
    for (int i = 0; i < 3000; i++)
        gradient[i] *= 4.0f;
    of_plan_step(f->plan, NULL, 0, NULL);
    return finish(f);
}

START_TEST(factors) {
    check_guard("factors", clipped_update_is_smaller);
}
END_TEST

static bool reader_sees_the_clipped_gradient(void) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 10);
    bool scaled = false;
    backward(t);
    const float before = *(const float *)(const void *)t->tensor->grad->data;
    of_plan_scale(f->plan, t->slot, 0.25, NAN, &scaled);
    const float *seen = fake_use(t->tensor->grad, false);
    bool right = *seen == before * 0.25f;
    finish(f);
    return right;
}

START_TEST(unread) {
    check_guard("unread", reader_sees_the_clipped_gradient);
}
END_TEST

static bool other_stream_waits(void) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = add_on_device(f, 100, 0);
    backward(t);
    step(f);
    fake_timeline_wait(&device.timeline, 1, 0);
    device.current = 1;
    fake_operator(t->tensor->param, false, "use");
    bool right = device.timeline.races == 0;
    finish(f);
    return right;
}

START_TEST(streams) {
    check_guard("streams", other_stream_waits);
}
END_TEST

/* Clipped on one stream, stepped on another that has waited for it. */
static bool clipped_update_of_another_stream_is_smaller(void) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = add_on_device(f, 100, 0);
    bool scaled = false;
    t->tensor->factor = fake_buffer_new(sizeof(float));
    *(float *)(void *)t->tensor->factor->data = 0.25f;
    backward(t);
    of_plan_scale(f->plan, t->slot, 0, NAN, &scaled);
    float *gradient = (float *)(void *)t->tensor->grad->data;
    for (int i = 0; i < 100; i++)
        gradient[i] *= 0.25f;
    expect_update(f, t);
    for (int i = 0; i < 100; i++)
        gradient[i] *= 4.0f;
    fake_timeline_wait(&device.timeline, 1, 0);
    device.current = 1;
    of_plan_step(f->plan, NULL, 0, NULL);
    fake_buffer_release(t->tensor->factor);
    return finish(f);
}

START_TEST(clipstream) {
    check_guard("clipstream", clipped_update_of_another_stream_is_smaller);
}
END_TEST

static bool captured_step_is_in_the_graph(void) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = add_on_device(f, 100, 0);
    device.capture[0] = 3;
    backward(t);
    step(f);
    bool right = launched(t);
    finish(f);
    return right;
}

static bool capture_is_not_spoiled_by(bool (*what)(fixture *f, const twin *t)) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = add_on_device(f, 100, 0);
    backward(t);
    step(f);
    device.current = 1;
    device.capture[1] = 3;
    bool right = what(f, t) && !device.spoiled;
    device.capture[1] = 0;
    finish(f);
    return right;
}

static bool is_refused(fixture *f, const twin *t) {
    (void)f;
    return of_access(t->tensor->param, false) == OF_ACCESS_FAILED;
}

static bool update_from_outside_stays_out_of_a_capture(void) {
    return capture_is_not_spoiled_by(is_refused);
}

static bool is_flushed(fixture *f, const twin *t) {
    (void)t;
    return of_plan_flush(f->plan) == OF_OK;
}

static bool flush_makes_no_capture_wait(void) {
    return capture_is_not_spoiled_by(is_flushed);
}

START_TEST(capture) {
    check_guard("capture", captured_step_is_in_the_graph);
    check_guard("capture", update_from_outside_stays_out_of_a_capture);
    check_guard("capture", flush_makes_no_capture_wait);
}
END_TEST

int main(void) {
    Suite *suite = suite_create(switchable ? "guards, switchable" : "guards, fixed");
    TCase *all = tcase_create("guards");
    tcase_add_test(all, rearm);
    tcase_add_test(all, twice);
    tcase_add_test(all, foreign);
    tcase_add_test(all, clear);
    tcase_add_test(all, fork_);
    tcase_add_test(all, streams);
    tcase_add_test(all, clipstream);
    tcase_add_test(all, capture);
    tcase_add_test(all, factors);
    tcase_add_test(all, unread);
    suite_add_tcase(suite, all);
    return run(suite);
}
