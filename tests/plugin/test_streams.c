/* SPDX-License-Identifier: BSD-3-Clause */
/* Updates on a device: which stream they run on, who waits for what comes late, and that no order
 * is lost against an optimizer that updates inside step(). */
#include "fake_device.h"
#include "random_bits.h"

#define FORWARD_THERE(name, bucket_bytes) ON_DEVICE(name, OF_FORWARD, bucket_bytes)
#define BACKWARD_THERE(name, bucket_bytes) ON_DEVICE(name, OF_BACKWARD, bucket_bytes)

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

static void use_all(const fixture *f, bool write) {
    for (size_t i = 0; i < f->n; i++)
        fake_operator(f->twins[i].tensor->param, write, "use");
}

FORWARD_THERE(step_launches_all_in_one_launch_on_its_stream, 1000) {
    device.current = 1;
    add_some_on_device(f, 8, 250);
    for (int i = 1; i <= 4; i++) {
        train(f);
        ck_assert_int_eq(device.launches, i);
        ck_assert_int_eq(device.entries, 8);
        ck_assert_int_eq(device.last_stream, 1);
        ck_assert_uint_eq(counts(f).pending + counts(f).in_flight, 0);
    }
    ck_assert(!of_any_pending());
    ck_assert_int_eq(device.waits + device.events + device.asked, 0);
}

/* A scaling, whose gradient somebody has looked at. */
static twin *in_flight(fixture *f) {
    twin *t = scaled_on_device(f, 10);
    look_at_gradient(t);
    ck_assert_uint_eq(counts(f).in_flight, 1);
    return t;
}

FORWARD_THERE(what_the_device_has_done_is_forgotten_at_a_later_step, 0) {
    twin *t = in_flight(f);
    fake_set_grad(t->tensor, NULL);
    step(f); /* leaves a fence */
    ck_assert_uint_eq(counts(f).in_flight, 1);
    device.busy = false;
    step(f);
    ck_assert_uint_eq(counts(f).in_flight, 0);
    ck_assert(!of_any_pending());
}

/* The first use of what is in flight leaves the fence, and one after it finds that it has passed. */
FORWARD_THERE(what_the_device_has_done_is_forgotten_at_a_use, 0) {
    const twin *t = in_flight(f);
    for (int i = 0; i < 3; i++)
        look_at_gradient(t);
    ck_assert_uint_eq(counts(f).in_flight, 1);
    ck_assert_int_le(device.events, 1);
    device.busy = false;
    look_at_gradient(t);
    ck_assert_uint_eq(counts(f).in_flight, 0);
    ck_assert(!of_any_pending());
}

static void gradient_on(int stream, fixture *f, size_t i) {
    device.current = stream;
    gradient(f, &f->twins[i]);
}

/* Counters on the device, of four buckets. */
enum { COUNTED = 8 };
static float steps[COUNTED];

static void add_counted(fixture *f) {
    for (int i = 0; i < COUNTED; i++) {
        steps[i] = 0;
        add_on_device(f, 250, 0)->tensor->step_at = &steps[i];
    }
}

/* All that had a gradient, by so many launches since the start. */
static void expect_counted(const fixture *f, int launches) {
    ck_assert_int_eq(device.counts, launches);
    for (size_t i = 0; i < COUNTED; i++)
        ck_assert_double_eq((double)steps[i], f->twins[i].step);
}

BACKWARD_THERE(one_launch_counts_the_steps_of_a_pass, 2000) {
    add_counted(f);
    for (int round = 1; round <= 3; round++) {
        for (int i = COUNTED - 1; i >= round % 2; i--) /* of some the last has no gradient */
            gradient(f, &f->twins[i]);
        ck_assert_int_eq(device.counts, round - 1);
        ck_assert_double_eq((double)steps[COUNTED - 1], round - 1);
        OK(end_pass(f));
        ck_assert_int_eq(device.launches, 4 * round);
        expect_counted(f, round);
        f->twins[0].tensor->grad = NULL;
        step(f);
        expect_counted(f, round);
    }
}

BACKWARD_THERE(the_steps_of_each_stream_are_counted_there, 2000) {
    add_counted(f);
    for (size_t i = 0; i < COUNTED; i++)
        gradient_on((int)i % 2, f, i);
    device.current = 0;
    OK(end_pass(f));
    expect_counted(f, 2);
    step(f);
}

BACKWARD_THERE(a_pass_that_fails_leaves_no_step_uncounted, 2000) {
    add_counted(f);
    for (size_t i = 0; i < 2; i++)
        gradient(f, &f->twins[i]);
    of_pass_abandon(f->pass);
    expect_counted(f, 1);
    step(f);
}

/* Somebody who saves the optimizer, for example. */
BACKWARD_THERE(a_flush_in_a_pass_counts_what_was_launched, 2000) {
    add_counted(f);
    gradient(f, &f->twins[0]);
    gradient(f, &f->twins[1]);
    OK(of_plan_flush(f->plan));
    expect_counted(f, 1);
    for (size_t i = 2; i < COUNTED; i++)
        gradient(f, &f->twins[i]);
    OK(end_pass(f));
    expect_counted(f, 2);
    step(f);
}

/* Python code of another parameter's hook may call it. */
BACKWARD_THERE(a_step_inside_a_pass_counts_its_own, OF_BUCKET_NONE) {
    add_counted(f);
    of_pass *pass = begin_pass(f);
    backward_expected(f);
    step_only(f);
    expect_counted(f, 1);
    of_pass_abandon(pass);
    of_pass_release(pass);
}


BACKWARD_THERE(other_hyper_parameters_take_another_launch, 8 * 400) {
    for (int i = 0; i < 8; i++)
        add_on_device(f, 100, (size_t)i % 2);
    for (int i = 7; i >= 0; i--)
        gradient(f, &f->twins[i]);
    ck_assert_int_eq(device.launches, 2);
    ck_assert_int_eq(device.entries, 4);
    ck_assert_uint_eq(counts(f).launches, 2);
    step(f);
}

FORWARD_THERE(one_launch_counts_the_steps_of_a_step, 0) {
    add_counted(f);
    for (int i = 1; i <= 3; i++) {
        train(f);
        expect_counted(f, i);
    }
}

FORWARD_THERE(cpu_and_device_share_a_plan, 0) {
    twin *far = add_on_device(f, 100, 0), *near = add(f, 100);
    for (int i = 0; i < 3; i++) {
        train(f);
        ck_assert(launched(far) && !launched(near));
        fake_use(near->tensor->param, false);
        ck_assert(launched(near));
    }
}

BACKWARD_THERE(backward_is_joined_by_its_caller_and_nothing_stays_in_flight, 0) {
    add_some_on_device(f, 3, 100);
    device.current = 1; /* where the gradients are complete */
    for (int i = 2; i >= 0; i--)
        gradient(f, &f->twins[i]);
    ck_assert_int_eq(device.launches, 0);
    fake_timeline_wait(&device.timeline, 0, 1); /* the engine's, before its last callback */
    device.current = 0;
    OK(end_pass(f));
    ck_assert_int_eq(device.launches, 1);
    ck_assert_int_eq(device.last_stream, 1);
    ck_assert_int_eq(device.current, 0);
    ck_assert_uint_eq(counts(f).in_flight, 0);
    step(f);
    use_all(f, true);
}

BACKWARD_THERE(gradients_of_two_streams_wait_apart, 2000) {
    add_some_on_device(f, 4, 250);
    gradient_on(1, f, 0);
    gradient_on(0, f, 1);
    ck_assert_int_eq(device.launches, 0);
    gradient_on(1, f, 2);
    ck_assert_int_eq(device.launches, 1);
    ck_assert_int_eq(device.last_stream, 1);
    ck_assert(launched(&f->twins[0]) && launched(&f->twins[2]) && !launched(&f->twins[1]));
    gradient_on(1, f, 3);
    device.current = 0;
    OK(end_pass(f));
    ck_assert(launched(&f->twins[1]) && launched(&f->twins[3]));
    step(f);
    use_all(f, true);
}

TESTS(side_stream_waits_for_gradients_and_is_joined, 3) {
    static const struct {
        size_t bucket_bytes;
        int launches;
    } rows[] = {{OF_BUCKET_NONE, 4}, {2000, 2}, {0, 1}};
    fixture *f = setup_on_device(OF_BACKWARD, rows[row].bucket_bytes);
    add_some_on_device(f, 4, 250);
    device.side = 2;
    for (int round = 0; round < 3; round++) {
        for (int i = 3; i >= 0; i--) {
            twin *t = &f->twins[i];
            backward_on_device(t);
            expect_update(f, t);
            OK(ready(f, t->slot));
        }
        fake_operator(f->twins[3].tensor->param, false, "a use inside backward");
        OK(end_pass(f));
        ck_assert_uint_eq(counts(f).in_flight, 0);
        for (int i = 0; i < 4; i++)
            fake_timeline_access(&device.timeline, 0, f->twins[i].tensor->param->data, true, "use");
        step(f);
    }
    ck_assert_int_eq(device.launches, 3 * rows[row].launches);
    ck_assert_int_eq(device.last_stream, 2);
    teardown_on_device(f);
}

BACKWARD_THERE(what_others_may_see_stays_off_the_side_stream, OF_BUCKET_NONE) {
    twin *t = add_on_device(f, 250, 0);
    t->tensor->shared = true;
    device.side = 2;
    gradient(f, t);
    ck_assert_int_eq(device.last_stream, 0);
    step(f);
}

FORWARD_THERE(drain_waits_for_the_device, 0) {
    twin *t = in_flight(f);
    OK(of_plan_drain(f->plan));
    ck_assert_int_eq(device.synchronized, 1);
    ck_assert_uint_eq(counts(f).in_flight, 0);
    ck_assert(!of_any_pending());
    device.current = 2;
    fake_operator(t->tensor->grad, true, "use");
}

TEST(dropped_plan_leaves_nothing_unordered) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = scaled_on_device(f, 100);
    fake_buffer *grad = t->tensor->grad, *factor = t->tensor->factor;
    fake_buffer_retain(grad);
    teardown(f);
    ck_assert(!of_any_pending());
    device.current = 1;
    fake_operator(grad, true, "use");
    expect_no_race();
    fake_buffer_release(grad);
    fake_buffer_release(factor);
}

WITH(failed_launch_is_told_by_step_and_by_every_step_after, setup_on_device(OF_FORWARD, 0),
     teardown_unchecked) {
    add_on_device(f, 100, 0);
    device.fail_launch = 1;
    backward_all(f);
    FAILS(OF_REFUSED, of_plan_step(f->plan, NULL, 0, NULL), "the device is broken");
    FAILS(OF_REFUSED, of_plan_step(f->plan, NULL, 0, NULL), "checkpoint");
    ck_assert_int_eq(of_plan_flush(f->plan), OF_REFUSED);
    ck_assert_ptr_nonnull(strstr(f->host->last_log, "the device is broken"));
}

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
    fixture *f = setup_on_device(OF_FORWARD, 0);
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
    teardown_on_device(f);
}

TEST(programs_without_races_in_stock_have_none) {
    for (unsigned seed = 0; seed < 1500; seed++)
        run_program(seed);
}
