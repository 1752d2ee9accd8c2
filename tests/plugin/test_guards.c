/* SPDX-License-Identifier: BSD-3-Clause */
/* Guards: with one switched off the same scenario gives wrong numbers, so the
 * tests that pass with it on prove something. Built twice: in the library that
 * people get, the switch must do nothing. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "fake_device.h"

#ifdef OF_TEST_GUARDS
static const bool switchable = true;
#else
static const bool switchable = false;
#endif

/* Whether all was right in the middle; at the end of each the twins are compared, too. */
typedef bool scenario(fixture *f);

/* Two steps without a use in between: the first must run first. */
static bool two_steps_are_in_order(fixture *f) {
    add(f, 100);
    train(f);
    train(f);
    fake_use(f->twins[0].tensor->param, false);
    return true;
}

static bool two_optimizers_are_in_order(fixture *f) {
    fixture *g = setup_beside(f, OF_FORWARD);
    twin *a = add(f, 100), *b = add_tensor(g, fake_tensor_alias(a->tensor), 1, false);
    void *state[] = {b->state[0], b->state[1]};
    backward(b);
    train(f);
    expect_update_at(b, a->param, state);
    of_plan_step(g->plan, NULL, 0, NULL);
    memcpy(b->param, a->param, a->tensor->param->bytes);
    const bool right = twin_equal(b);
    teardown_unchecked(g);
    return right;
}

static bool second_gradient_is_not_applied(fixture *f) {
    twin *t = add(f, 100);
    gradient(f, t);
    backward(t);
    ready(f, t->slot);
    return true;
}

/* A foreign thread that read the parameter once reads it again, now without
 * looking for a mark. */
static bool foreign_reader_sees_the_next_update(fixture *f) {
    twin *t = pending(f, 100);
    fake_use(t->tensor->param, true);
    train(f);
    return launched(t);
}

static bool cleared_plan_has_updated(fixture *f) {
    pending(f, 100);
    of_plan_clear(f->plan);
    return true;
}

static bool released_plan_has_updated(fixture *f) {
    twin *t = pending(f, 100);
    of_plan_release(f->plan);
    f->plan = NULL;
    return launched(t);
}

static bool all_is_launched_before_a_fork(fixture *f) {
    twin *t = pending(f, 100);
    of_fork_prepare();
    const bool right = launched(t); /* what a child would get a copy of */
    of_fork_parent();
    return right;
}

/* Expects the update by a gradient that is multiplied by a quarter. */
static void expect_quarter(fixture *f, twin *t) {
    float *gradient = (float *)(void *)t->tensor->grad->data;
    for (int i = 0; i < t->tensor->numel; i++) /* a product by 0.25 and one by 4 are exact */
        gradient[i] *= 0.25f;
    expect_update(f, t);
    for (int i = 0; i < t->tensor->numel; i++)
        gradient[i] *= 4.0f;
}

static bool clipped_update_is_smaller(fixture *f) {
    twin *t = add(f, 3000);
    bool scaled = false;
    backward(t);
    of_plan_scale(f->plan, t->slot, 0.25, NAN, &scaled);
    expect_quarter(f, t);
    of_plan_step(f->plan, NULL, 0, NULL);
    return true;
}

static bool reader_sees_the_clipped_gradient(fixture *f) {
    twin *t = add(f, 10);
    bool scaled = false;
    backward(t);
    const float before = *(const float *)(const void *)t->tensor->grad->data;
    of_plan_scale(f->plan, t->slot, 0.25, NAN, &scaled);
    const float *seen = fake_use(t->tensor->grad, false);
    return *seen == before * 0.25f;
}

static bool other_stream_waits(fixture *f) {
    const twin *t = scaled_on_device(f, 100);
    go_to_stream(1);
    look_at_gradient(t);
    return device.timeline.races == 0;
}

/* Clipped on one stream, stepped on another that has waited for it. */
static bool clipped_update_of_another_stream_is_smaller(fixture *f) {
    twin *t = add_on_device(f, 100, 0);
    bool scaled = false;
    t->tensor->factor = fake_buffer_new(sizeof(float));
    *(float *)(void *)t->tensor->factor->data = 0.25f;
    backward(t);
    of_plan_scale(f->plan, t->slot, 0, NAN, &scaled);
    expect_quarter(f, t);
    go_to_stream(1);
    of_plan_step(f->plan, NULL, 0, NULL);
    return true;
}

/* A scaling is pending when a capture begins, in which something is done. */
static bool capture_is_not_spoiled(fixture *f, bool flushes) {
    const twin *t = scaled_on_device(f, 100);
    device.current = 1;
    device.capture[1] = 3;
    const bool right = flushes ? of_plan_flush(f->plan) == OF_OK
                               : of_access(t->tensor->grad, false) == OF_ACCESS_FAILED;
    device.capture[1] = 0;
    return right && !device.spoiled;
}

static bool work_from_outside_stays_out_of_a_capture(fixture *f) {
    return capture_is_not_spoiled(f, false);
}

static bool flush_makes_no_capture_wait(fixture *f) {
    return capture_is_not_spoiled(f, true);
}

static const struct {
    const char *guard;
    scenario *play;
    of_mode mode;
    bool on_device;
} rows[] = {
    {"rearm", two_steps_are_in_order, OF_FORWARD, false},
    {"rearm", two_optimizers_are_in_order, OF_FORWARD, false},
    {"twice", second_gradient_is_not_applied, OF_BACKWARD, false},
    {"foreign", foreign_reader_sees_the_next_update, OF_FORWARD, false},
    {"clear", cleared_plan_has_updated, OF_FORWARD, false},
    {"clear", released_plan_has_updated, OF_FORWARD, false},
    {"fork", all_is_launched_before_a_fork, OF_FORWARD, false},
    {"factors", clipped_update_is_smaller, OF_FORWARD, false},
    {"unread", reader_sees_the_clipped_gradient, OF_FORWARD, false},
    {"streams", other_stream_waits, OF_FORWARD, true},
    {"clipstream", clipped_update_of_another_stream_is_smaller, OF_FORWARD, true},
    {"capture", work_from_outside_stays_out_of_a_capture, OF_FORWARD, true},
    {"capture", flush_makes_no_capture_wait, OF_FORWARD, true},
};

/* With these guards off; NULL: with all on. */
static bool is_right(int row, const char *off) {
    if (off)
        setenv("OPTFUSE_TEST_GUARDS_OFF", off, 1);
    fixture *f = (rows[row].on_device ? setup_on_device : setup)(rows[row].mode, OF_BUCKET_NONE);
    bool right = rows[row].play(f);
    if (f->plan)
        of_plan_flush(f->plan);
    for (size_t i = 0; i < f->n; i++) {
        right = right && launched(&f->twins[i]);
        fake_buffer_release(f->twins[i].tensor->factor);
    }
    teardown_unchecked(f);
    unsetenv("OPTFUSE_TEST_GUARDS_OFF");
    return right;
}

TESTS(without_its_guard_a_scenario_goes_wrong, LENGTH(rows)) {
    const char *name = rows[row].guard;
    char list[64];
    snprintf(list, sizeof list, "other,%s", name);
    ck_assert_msg(is_right(row, NULL), "row %d: wrong with all guards on", row);
    ck_assert_msg(is_right(row, "other,others"), "row %d: wrong with another guard off", row);
    ck_assert_msg(is_right(row, name) != switchable, "row %d: guard %s %s", row, name,
                  switchable ? "can be off without harm" : "can be switched off");
    ck_assert_msg(is_right(row, list) != switchable, "row %d: guard %s in a list", row, name);
}
