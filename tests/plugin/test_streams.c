/* SPDX-License-Identifier: BSD-3-Clause */
/* Updates on a device: which stream they run on, who waits for them, and that
 * no order is lost against an optimizer that updates inside step(). */
#include <string.h>

#include "fake_device.h"
#include "fixture.h"
#include "random_bits.h"

static void expect_no_race(void) {
    ck_assert_msg(device.timeline.races == 0, "%d races, first: %s", device.timeline.races,
                  device.timeline.first_race);
}

static void finish(fixture *f) {
    expect_no_race();
    teardown(f);
    ck_assert_int_eq(device.events, 0);
}

static void forget_in(fake_timeline *timeline, const void *memory) {
    for (size_t i = 0; i < timeline->n_seen; i++)
        if (timeline->seen[i].memory == memory)
            timeline->seen[i] = timeline->seen[--timeline->n_seen];
}

/* A gradient in fresh memory, made on the current stream. */
static void backward_on_device(twin *t) {
    backward(t);
    forget_in(&device.timeline, t->tensor->grad->data);
    fake_operator(t->tensor->grad, true, "backward");
}

START_TEST(update_is_launched_on_the_stream_of_its_step) {
    fixture *f = setup_on_device(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add_on_device(f, 1000, 0);
    device.current = 1;
    backward(t);
    step(f);
    ck_assert_int_eq(device.launches, 0);
    device.current = 2;
    fake_timeline_wait(&device.timeline, 2, 1);
    fake_operator(t->tensor->param, false, "use");
    ck_assert_int_eq(device.launches, 1);
    ck_assert_int_eq(device.last_stream, 1);
    ck_assert_int_eq(device.waits, 1);
    ck_assert(launched(t));
    finish(f);
}
END_TEST

START_TEST(every_later_stream_waits_too) {
    fixture *f = setup_on_device(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add_on_device(f, 10, 0);
    backward(t);
    step(f);
    for (int stream = 1; stream < FAKE_STREAMS; stream++)
        fake_timeline_wait(&device.timeline, stream, 0);
    for (int stream = 0; stream < FAKE_STREAMS; stream++) {
        device.current = stream;
        fake_operator(t->tensor->param, false, "use");
        fake_operator(t->tensor->state[0], false, "use of state");
    }
    ck_assert_int_eq(device.launches, 1);
    ck_assert_uint_eq(counts(f).in_flight, 1);
    finish(f);
}
END_TEST

START_TEST(one_stream_needs_no_events_but_a_fence_a_step) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    for (int i = 0; i < 5; i++)
        add_on_device(f, 100, 0);
    for (int i = 0; i < 4; i++) {
        backward_all(f);
        step(f);
        fake_operator(f->twins[0].tensor->param, false, "use");
    }
    ck_assert_int_eq(device.waits, 0);
    ck_assert_int_eq(device.synchronized, 0);
    ck_assert_int_le(device.events, 1);
    finish(f);
}
END_TEST

START_TEST(what_the_device_has_done_is_forgotten_at_a_later_step) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = add_on_device(f, 10, 0);
    twin *other = add_on_device(f, 10, 0);
    backward(t);
    step(f);
    fake_operator(t->tensor->param, false, "use");
    ck_assert_uint_eq(counts(f).in_flight, 1);
    fake_set_grad(t->tensor, NULL);
    step(f); /* leaves a fence */
    ck_assert_uint_eq(counts(f).in_flight, 1);
    device.busy = false;
    step(f);
    ck_assert_uint_eq(counts(f).in_flight, 0);
    ck_assert(!of_any_pending());
    backward(other);
    step(f);
    finish(f);
}
END_TEST

/* The first use of one in flight leaves the fence, and some use after it finds that it has
 * passed; those between do not all ask. */
START_TEST(marks_go_at_a_use_after_the_fence) {
    enum { N = 4 };
    fixture *f = setup_on_device(OF_FORWARD, 0);
    for (int i = 0; i < N; i++)
        add_on_device(f, 100, 0);
    backward_all(f);
    step(f);
    for (int use = 0; use < 2 + 4 * 8; use++)
        fake_operator(f->twins[0].tensor->param, false, "use");
    ck_assert_uint_eq(counts(f).in_flight, N);
    ck_assert_int_eq(f->twins[0].tensor->finished, 0);
    ck_assert_int_eq(device.asked, 4);
    ck_assert_int_le(device.events, 1);
    device.busy = false;
    for (int use = 0; use < 8; use++)
        fake_operator(f->twins[0].tensor->param, false, "use");
    ck_assert_int_eq(device.asked, 5);
    ck_assert_uint_eq(counts(f).in_flight, 0);
    for (int i = 0; i < N; i++)
        ck_assert_int_eq(f->twins[i].tensor->finished, 1);
    ck_assert(!of_any_pending());
    finish(f);
}
END_TEST

START_TEST(the_mark_of_a_later_update_stays) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *again = add_on_device(f, 100, 0), *once = add_on_device(f, 100, 0);
    backward_all(f);
    step(f);
    for (int use = 0; use < 2; use++)
        fake_operator(once->tensor->param, false, "use");
    fake_set_grad(once->tensor, NULL);
    backward(again);
    step(f);
    device.busy = false;
    for (int use = 0; use < 8; use++)
        fake_operator(once->tensor->param, false, "use");
    ck_assert_int_eq(once->tensor->finished, 1);
    ck_assert_int_eq(again->tensor->finished, 0);
    ck_assert_uint_eq(counts(f).pending, 1);
    finish(f);
}
END_TEST

START_TEST(neighbours_are_launched_together_up_to_the_bucket) {
    fixture *f = setup_on_device(OF_FORWARD, 4000);
    for (int i = 0; i < 8; i++)
        add_on_device(f, 250, 0);
    backward_all(f);
    step(f);
    fake_operator(f->twins[2].tensor->param, false, "use");
    ck_assert_int_eq(device.launches, 1);
    ck_assert_int_eq(device.entries, 4);
    ck_assert(launched(&f->twins[5]) && !launched(&f->twins[6]) && !launched(&f->twins[1]));
    fake_operator(f->twins[6].tensor->grad, false, "use of the gradient");
    ck_assert_int_eq(device.entries, 2);
    ck_assert_uint_eq(counts(f).pending, 2);
    finish(f);
}
END_TEST

START_TEST(one_launch_counts_the_steps_of_all_buckets) {
    enum { N = 8 };
    static float steps[N];
    fixture *f = setup_on_device(OF_FORWARD, 2000);
    memset(steps, 0, sizeof steps);
    for (int i = 0; i < N; i++)
        add_on_device(f, 250, (size_t)i % 2)->tensor->step_at = &steps[i];
    for (int round = 1; round <= 3; round++) {
        device.current = round - 1;
        fake_timeline_wait(&device.timeline, device.current, 0);
        backward_all(f);
        step(f);
        fake_operator(f->twins[4].tensor->param, false, "use");
        ck_assert_int_eq(device.counts, round);
        for (int i = 0; i < N; i++)
            fake_operator(f->twins[i].tensor->param, false, "use");
        ck_assert_int_eq(device.counts, round);
        ck_assert_int_ge(device.launches, 4 * round);
        for (int i = 0; i < N; i++)
            ck_assert_double_eq((double)steps[i], round);
        device.current = 0;
        for (int i = 0; i < N; i++)
            fake_operator(f->twins[i].tensor->param, false, "use");
    }
    finish(f);
}
END_TEST

START_TEST(other_hyper_parameters_take_another_launch) {
    fixture *f = setup_on_device(OF_BACKWARD, 8 * 400);
    for (int i = 0; i < 8; i++)
        add_on_device(f, 100, (size_t)i % 2);
    for (int i = 7; i >= 0; i--)
        gradient(f, &f->twins[i]);
    ck_assert_int_eq(device.launches, 2);
    ck_assert_int_eq(device.entries, 4);
    ck_assert_uint_eq(counts(f).launches, 2);
    step(f);
    finish(f);
}
END_TEST

START_TEST(cpu_and_device_share_a_plan) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *far = add_on_device(f, 100, 0);
    twin *near = add(f, 100);
    for (int i = 0; i < 3; i++) {
        backward_all(f);
        step(f);
        fake_operator(far->tensor->param, false, "use");
        ck_assert(launched(far) && !launched(near));
        fake_use(near->tensor->param, false);
        ck_assert(launched(near));
    }
    finish(f);
}
END_TEST

START_TEST(next_step_on_another_stream_comes_after_what_is_in_flight) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = add_on_device(f, 100, 0);
    for (int i = 0; i < 5; i++) {
        device.current = i % FAKE_STREAMS;
        backward_on_device(t);
        step(f);
        fake_timeline_wait(&device.timeline, (i + 1) % FAKE_STREAMS, device.current);
        if (i % 2)
            fake_operator(t->tensor->param, false, "use");
    }
    finish(f);
}
END_TEST

START_TEST(another_plans_update_in_flight_is_waited_for) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    fixture *g = setup_beside(f, OF_FORWARD);
    twin *t = add_on_device(f, 100, 0);
    fake_tensor *alias = fake_tensor_alias(t->tensor);
    twin *other = add_tensor(g, alias, 0, false);
    alias->device = OF_CUDA;
    backward(t);
    step(f);
    fake_operator(t->tensor->param, false, "use");
    device.current = 1;
    fake_timeline_wait(&device.timeline, 1, 0);
    backward(other);
    fake_use(t->tensor->param, false); /* as collect() does */
    memcpy(other->param, t->param, t->tensor->param->bytes);
    step(g);
    fake_operator(alias->param, false, "use");
    memcpy(t->param, other->param, t->tensor->param->bytes);
    expect_no_race();
    check_twin(other);
    check_twin(t);
    teardown_unchecked(g);
    teardown_unchecked(f);
}
END_TEST

START_TEST(backward_is_joined_by_its_caller_and_nothing_stays_in_flight) {
    fixture *f = setup_on_device(OF_BACKWARD, 0);
    for (int i = 0; i < 3; i++)
        add_on_device(f, 100, 0);
    device.current = 1; /* where the gradients are complete */
    for (int i = 2; i >= 0; i--)
        gradient(f, &f->twins[i]);
    ck_assert_int_eq(device.launches, 0);
    fake_timeline_wait(&device.timeline, 0, 1); /* the engine's, before its last callback */
    device.current = 0;
    ck_assert_int_eq(end_pass(f), OF_OK);
    ck_assert_int_eq(device.launches, 1);
    ck_assert_int_eq(device.last_stream, 1);
    ck_assert_int_eq(device.current, 0);
    ck_assert_uint_eq(counts(f).in_flight, 0);
    step(f);
    for (int i = 0; i < 3; i++)
        fake_operator(f->twins[i].tensor->param, true, "use");
    finish(f);
}
END_TEST

START_TEST(gradients_of_two_streams_wait_apart) {
    fixture *f = setup_on_device(OF_BACKWARD, 2000);
    twin *a = add_on_device(f, 250, 0);
    twin *b = add_on_device(f, 250, 0);
    twin *c = add_on_device(f, 250, 0);
    twin *d = add_on_device(f, 250, 0);
    device.current = 1;
    gradient(f, a);
    device.current = 0;
    gradient(f, b);
    ck_assert_int_eq(device.launches, 0);
    device.current = 1;
    gradient(f, c);
    ck_assert_int_eq(device.launches, 1);
    ck_assert_int_eq(device.last_stream, 1);
    ck_assert(launched(a) && launched(c) && !launched(b));
    gradient(f, d);
    device.current = 0;
    ck_assert_int_eq(end_pass(f), OF_OK);
    ck_assert(launched(b) && launched(d));
    step(f);
    for (size_t i = 0; i < f->n; i++)
        fake_operator(f->twins[i].tensor->param, true, "use");
    finish(f);
}
END_TEST

static void backward_beside(size_t bucket_bytes, int launches) {
    fixture *f = setup_on_device(OF_BACKWARD, bucket_bytes);
    for (int i = 0; i < 4; i++)
        add_on_device(f, 250, 0);
    device.side = 2;
    for (int round = 0; round < 3; round++) {
        for (int i = 3; i >= 0; i--) {
            twin *t = &f->twins[i];
            backward_on_device(t);
            expect_update(f, t);
            ck_assert_int_eq(ready(f, t->slot), OF_OK);
        }
        fake_operator(f->twins[3].tensor->param, false, "a use inside backward");
        ck_assert_int_eq(end_pass(f), OF_OK);
        ck_assert_uint_eq(counts(f).in_flight, 0);
        for (int i = 0; i < 4; i++)
            fake_timeline_access(&device.timeline, 0, f->twins[i].tensor->param->data, true, "use");
        step(f);
    }
    ck_assert_int_eq(device.launches, 3 * launches);
    ck_assert_int_eq(device.last_stream, 2);
    finish(f);
}

START_TEST(side_stream_waits_for_gradients_and_is_joined) {
    backward_beside(OF_BUCKET_NONE, 4);
    backward_beside(2000, 2);
    backward_beside(0, 1);
}
END_TEST

START_TEST(what_others_may_see_stays_off_the_side_stream) {
    fixture *f = setup_on_device(OF_BACKWARD, OF_BUCKET_NONE);
    twin *t = add_on_device(f, 250, 0);
    t->tensor->shared = true;
    device.side = 2;
    gradient(f, t);
    ck_assert_int_eq(device.last_stream, 0);
    step(f);
    finish(f);
}
END_TEST

START_TEST(drain_waits_for_the_device) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = add_on_device(f, 100, 0);
    backward(t);
    step(f);
    ck_assert_int_eq(of_plan_drain(f->plan), OF_OK);
    ck_assert_int_eq(device.synchronized, 1);
    ck_assert_uint_eq(counts(f).in_flight, 0);
    ck_assert(!of_any_pending());
    device.current = 2;
    fake_operator(t->tensor->param, true, "use");
    finish(f);
}
END_TEST

START_TEST(dropped_plan_leaves_nothing_unordered) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = add_on_device(f, 100, 0);
    fake_buffer *param = t->tensor->param;
    fake_buffer_retain(param);
    backward(t);
    step(f);
    teardown(f);
    ck_assert(!of_any_pending());
    device.current = 1;
    fake_operator(param, true, "use");
    expect_no_race();
    fake_buffer_release(param);
}
END_TEST

START_TEST(failed_launch_is_told_at_its_use_and_at_every_step_after) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = add_on_device(f, 100, 0);
    backward(t);
    step(f);
    device.fail_launch = 1;
    ck_assert_int_eq(of_access(t->tensor->param, false), OF_ACCESS_FAILED);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "the device is broken"));
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_REFUSED);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "checkpoint"));
    ck_assert_int_eq(of_plan_flush(f->plan), OF_REFUSED);
    ck_assert_ptr_nonnull(strstr(f->host->last_log, "the device is broken"));
    teardown_unchecked(f);
}
END_TEST

/* Random programs on three streams that would be free of races with an
 * optimizer that updates inside step(): what stock's timeline needs is waited
 * for by the program itself, in both timelines, at that point and no later. */

static uint64_t state;

static int pick(int n) {
    return (int)((random_bits(&state) >> 22) % (unsigned)n);
}

static fake_timeline stock;

static void user_waits(int after, int before) {
    fake_timeline_wait(&stock, after, before);
    fake_timeline_wait(&device.timeline, after, before);
}

static void in_stock(const fake_buffer *buffer, bool write) {
    for (int s = 0; s < FAKE_STREAMS; s++)
        if (!fake_timeline_ordered(&stock, device.current, buffer->data, write))
            user_waits(device.current, s);
    fake_timeline_access(&stock, device.current, buffer->data, write, "stock");
}

static void step_in_both(fixture *f) {
    for (size_t i = 0; i < f->n; i++) {
        const fake_tensor *tensor = f->twins[i].tensor;
        if (!tensor->grad)
            continue;
        in_stock(tensor->param, true);
        in_stock(tensor->grad, false);
        for (size_t k = 0; k < tensor->n_state; k++)
            in_stock(tensor->state[k], true);
    }
    step(f);
}

static void backward_in_both(twin *t) {
    backward_on_device(t);
    forget_in(&stock, t->tensor->grad->data);
    in_stock(t->tensor->grad, true);
}

static void use_in_both(const twin *t) {
    fake_buffer *buffers[] = {t->tensor->param, t->tensor->state[0], t->tensor->state[1],
                              t->tensor->grad ? t->tensor->grad : t->tensor->param};
    fake_buffer *buffer = buffers[pick(4)];
    const bool write = pick(4) == 0;
    in_stock(buffer, write);
    fake_operator(buffer, write, "a use");
}

static void run_program(unsigned seed) {
    fixture *f = setup_on_device(OF_FORWARD, pick(2) ? OF_BUCKET_NONE : 1000);
    state = seed * 77u + 5u;
    stock = (fake_timeline){0};
    for (int i = 0; i < 4; i++)
        add_on_device(f, 100 + 50 * i, (size_t)pick(2));
    for (int i = 0; i < 60; i++) {
        twin *t = &f->twins[pick(4)];
        device.busy = pick(3) != 0;
        switch (pick(7)) {
        case 0:
            device.current = pick(FAKE_STREAMS);
            break;
        case 1:
            user_waits(pick(FAKE_STREAMS), pick(FAKE_STREAMS));
            break;
        case 2:
            backward_in_both(t);
            break;
        case 3:
            step_in_both(f);
            break;
        case 4:
            if (pick(8) == 0)
                of_plan_flush(f->plan);
            break;
        default:
            use_in_both(t);
        }
    }
    ck_assert_int_eq(stock.races, 0);
    finish(f);
}

START_TEST(programs_without_races_in_stock_have_none) {
    for (unsigned seed = 0; seed < 1500; seed++)
        run_program(seed);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("streams");
    TCase *tcase = tcase_create("streams");
    tcase_add_test(tcase, update_is_launched_on_the_stream_of_its_step);
    tcase_add_test(tcase, every_later_stream_waits_too);
    tcase_add_test(tcase, one_stream_needs_no_events_but_a_fence_a_step);
    tcase_add_test(tcase, what_the_device_has_done_is_forgotten_at_a_later_step);
    tcase_add_test(tcase, marks_go_at_a_use_after_the_fence);
    tcase_add_test(tcase, the_mark_of_a_later_update_stays);
    tcase_add_test(tcase, neighbours_are_launched_together_up_to_the_bucket);
    tcase_add_test(tcase, one_launch_counts_the_steps_of_all_buckets);
    tcase_add_test(tcase, other_hyper_parameters_take_another_launch);
    tcase_add_test(tcase, cpu_and_device_share_a_plan);
    tcase_add_test(tcase, next_step_on_another_stream_comes_after_what_is_in_flight);
    tcase_add_test(tcase, another_plans_update_in_flight_is_waited_for);
    tcase_add_test(tcase, backward_is_joined_by_its_caller_and_nothing_stays_in_flight);
    tcase_add_test(tcase, gradients_of_two_streams_wait_apart);
    tcase_add_test(tcase, side_stream_waits_for_gradients_and_is_joined);
    tcase_add_test(tcase, what_others_may_see_stays_off_the_side_stream);
    tcase_add_test(tcase, drain_waits_for_the_device);
    tcase_add_test(tcase, dropped_plan_leaves_nothing_unordered);
    tcase_add_test(tcase, failed_launch_is_told_at_its_use_and_at_every_step_after);
    tcase_add_test(tcase, programs_without_races_in_stock_have_none);
    suite_add_tcase(suite, tcase);
    return run(suite);
}
