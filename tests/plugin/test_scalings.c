/* SPDX-License-Identifier: BSD-3-Clause */
/* Scalings: a gradient that is to be multiplied is, for whoever looks at it and for every update,
 * though nobody has written it. On a device the factor is there too, and nobody waits for it. */
#include <math.h>

#include "fake_device.h"
#include "scale.h"

/* The present gradient multiplied by both, in one of a few rooms that serve in turn. */
static unsigned char *multiplied(const twin *t, double a, double b) {
    static unsigned char rooms[8][1 << 20];
    static size_t turn;
    const double factors[] = {a, b};
    unsigned char *room = rooms[turn++ % LENGTH(rooms)];
    ck_assert_uint_le(t->tensor->grad->bytes, sizeof rooms[0]);
    of_scale_find(t->tensor->dtype, OF_ISA_C)(room, t->tensor->grad->data, (size_t)t->tensor->numel,
                                              factors);
    return room;
}

static bool memory_is(const twin *t, const unsigned char *bytes) {
    return memcmp(t->tensor->grad->data, bytes, t->tensor->grad->bytes) == 0;
}

/* Expects the update by a gradient of these bytes. */
static void expect_update_with(fixture *f, twin *t, const unsigned char *bytes) {
    fake_buffer *grad = t->tensor->grad;
    const unsigned char *raw = multiplied(t, 1.0, 1.0);
    memcpy(grad->data, bytes, grad->bytes);
    expect_update(f, t);
    memcpy(grad->data, raw, grad->bytes);
}

static void step_with(fixture *f, twin *t, const unsigned char *bytes) {
    expect_update_with(f, t, bytes);
    step_only(f);
}

/* On the CPU */

static void scale(fixture *f, twin *t, double factor) {
    bool scaled = false;
    OK(of_plan_scale(f->plan, t->slot, factor, NAN, &scaled));
    ck_assert(scaled);
}

/* A new one whose gradient is to be multiplied; what its memory is now and then. */
static twin *scaled_by(fixture *f, int64_t numel, double factor, const unsigned char **raw,
                       const unsigned char **wanted) {
    twin *t = add(f, numel);
    backward(t);
    *raw = multiplied(t, 1.0, 1.0);
    *wanted = multiplied(t, factor, 1.0);
    scale(f, t, factor);
    return t;
}

static void update_and_reader_see_it(of_dtype dtype, int64_t numel, double a, double b) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add_dtype(f, numel, dtype);
    backward(t);
    const unsigned char *raw = multiplied(t, 1.0, 1.0), *wanted = multiplied(t, a, b);
    scale(f, t, a);
    if (b != 1.0)
        scale(f, t, b);
    ck_assert(memory_is(t, raw));
    step_with(f, t, wanted);
    ck_assert_uint_eq(counts(f).pending, 1);
    check_twin(t);
    ck_assert(memory_is(t, raw) && of_is_scaled(t->tensor->grad));
    fake_use(t->tensor->grad, false);
    ck_assert(memory_is(t, wanted) && !of_is_scaled(t->tensor->grad));
    teardown(f);
}

TESTS(an_update_and_a_reader_see_the_gradient_multiplied, OF_DTYPE_COUNT) {
    static const int64_t sizes[] = {1, 7, 100, 1023, 1024, 1025, 5000, 70001};
    for (size_t i = 0; i < LENGTH(sizes); i++)
        for (int both = 0; both < 2; both++)
            update_and_reader_see_it((of_dtype)row, sizes[i], 0.3, both ? 0.7 : 1.0);
}

FORWARD(a_reader_before_step_ends_it) {
    const unsigned char *raw, *wanted;
    twin *t = scaled_by(f, 3000, 0.3, &raw, &wanted);
    fake_use(t->tensor->grad, false);
    ck_assert(memory_is(t, wanted));
    step(f);
}

FORWARD(the_update_is_launched_before_its_gradient_changes) {
    const unsigned char *raw, *wanted;
    twin *t = scaled_by(f, 3000, 0.3, &raw, &wanted);
    step_with(f, t, wanted);
    fake_use(t->tensor->grad, false);
    ck_assert(launched(t) && memory_is(t, wanted));
    step(f); /* again with the same gradient, now multiplied in memory */
}

FORWARD(a_third_factor_is_taken_after_the_first_two_are_applied) {
    const unsigned char *raw, *one;
    twin *t = scaled_by(f, 50, 0.3, &raw, &one);
    const unsigned char *two = multiplied(t, 0.3, 0.7);
    scale(f, t, 0.7);
    ck_assert(memory_is(t, raw));
    scale(f, t, 0.9);
    ck_assert(memory_is(t, two));
    const unsigned char *three = multiplied(t, 0.9, 1.0);
    fake_use(t->tensor->grad, false);
    ck_assert(memory_is(t, three));
}

FORWARD(what_others_may_see_is_multiplied_at_once) {
    twin *t = add(f, 50);
    t->tensor->shared = true;
    backward(t);
    const unsigned char *wanted = multiplied(t, 0.3, 1.0);
    scale(f, t, 0.3);
    ck_assert(memory_is(t, wanted));
    step(f);
}

static void end_flush(fixture *f) {
    of_plan_flush(f->plan);
}

static void end_flush_all(fixture *f) {
    (void)f;
    of_flush_all();
}

static void end_clear(fixture *f) {
    of_plan_clear(f->plan);
}

static void end_fork(fixture *f) {
    (void)f;
    of_fork_prepare();
    of_fork_parent();
}

TESTS(what_launches_all_updates_ends_all_scalings, 4 * 2) {
    static void (*const ends[])(fixture * f) = {end_flush, end_flush_all, end_clear, end_fork};
    const unsigned char *raw, *wanted;
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = scaled_by(f, 3000, 0.3, &raw, &wanted);
    if (row % 2)
        step_with(f, t, wanted);
    ends[row / 2](f);
    ck_assert(memory_is(t, wanted) && launched(t));
    teardown(f);
}

FORWARD(a_gradient_that_is_gone_is_forgotten) {
    twin *t = add(f, 3000);
    for (int i = 0; i < 4; i++) {
        backward(t);
        scale(f, t, 0.3);
        fake_set_grad(t->tensor, NULL);
        ck_assert_int_eq(atomic_load(&f->host->holds), 1);
        if (i < 3)
            of_plan_sweep(f->plan);
        else
            of_plan_flush(f->plan);
        ck_assert_int_eq(atomic_load(&f->host->holds), 0);
    }
}

FORWARD(a_living_gradient_is_not_swept) {
    const unsigned char *raw, *wanted;
    twin *t = scaled_by(f, 30, 0.3, &raw, &wanted);
    of_plan_sweep(f->plan);
    ck_assert(of_is_scaled(t->tensor->grad));
}

FORWARD(nothing_to_scale_is_said) {
    twin *t = add(f, 30);
    bool scaled = true;
    OK(of_plan_scale(f->plan, t->slot, 0.3, NAN, &scaled));
    ck_assert(!scaled);
    INVALID(of_plan_scale(f->plan, 99, 0.3, NAN, &scaled), "slot 99");
}

/* On a device */

static const float FACTOR = 0.3f;
#define CLIPPED(name) ON_DEVICE(name, OF_FORWARD, 0)

/* As clipping does on the current stream. */
static bool clip(fixture *f, twin *t, float factor) {
    bool scaled = false;
    fake_buffer_release(t->tensor->factor);
    t->tensor->factor = fake_buffer_new(sizeof factor);
    memcpy(t->tensor->factor->data, &factor, sizeof factor);
    fake_timeline_access(&device.timeline, device.current, t->tensor->factor->data, true, "clip");
    OK(of_plan_scale(f->plan, t->slot, NAN, NAN, &scaled));
    return scaled;
}

/* All by one factor, which is in one place. */
static void clip_all(fixture *f) {
    clip(f, &f->twins[0], FACTOR);
    for (size_t i = 1; i < f->n; i++) {
        bool scaled = false;
        f->twins[i].tensor->factor = f->twins[0].tensor->factor;
        fake_buffer_retain(f->twins[i].tensor->factor);
        OK(of_plan_scale(f->plan, f->twins[i].slot, NAN, NAN, &scaled));
    }
}

static twin *with_gradient(fixture *f, int64_t numel) {
    twin *t = add_on_device(f, numel, 0);
    backward(t);
    fake_operator(t->tensor->grad, true, "backward");
    return t;
}

/* A new one that has been clipped; *wanted: what its gradient's memory is to become. */
static twin *clipped(fixture *f, int64_t numel, const unsigned char **wanted) {
    twin *t = with_gradient(f, numel);
    *wanted = multiplied(t, (double)FACTOR, 1.0);
    ck_assert(clip(f, t, FACTOR));
    return t;
}

static void look(const twin *t, const unsigned char *wanted) {
    fake_operator(t->tensor->grad, false, "look");
    ck_assert(memory_is(t, wanted));
}

CLIPPED(the_update_applies_the_factor_and_a_reader_sees_it) {
    const unsigned char *wanted;
    twin *t = clipped(f, 3000, &wanted);
    ck_assert_int_eq(device.launches, 0);
    step_with(f, t, wanted);
    use_there(t);
    ck_assert_int_eq(device.launches, 1);
    ck_assert(!memory_is(t, wanted) && of_is_scaled(t->tensor->grad));
    for (int i = 0; i < 2; i++) {
        look(t, wanted);
        ck_assert_int_eq(device.launches, 2);
        ck_assert(!of_is_scaled(t->tensor->grad));
    }
}

CLIPPED(a_reader_before_step_leaves_the_update_without_factor) {
    const unsigned char *wanted;
    const twin *t = clipped(f, 100, &wanted);
    look(t, wanted);
    step(f);
}

CLIPPED(a_scaling_keeps_the_factor_alive) {
    const unsigned char *wanted;
    twin *t = clipped(f, 100, &wanted);
    ck_assert_int_eq(atomic_load(&t->tensor->factor->refs), 2);
    step_with(f, t, wanted);
    ck_assert_int_eq(atomic_load(&t->tensor->factor->refs), 2);
    of_plan_flush(f->plan);
    ck_assert_int_eq(atomic_load(&t->tensor->factor->refs), 1);
}

/* They look after a wait that was made before anything was launched. */
TESTS(other_streams_wait_for_the_product, 2) {
    const unsigned char *wanted;
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = clipped(f, 100, &wanted);
    if (row)
        step_with(f, t, wanted);
    for (int stream = 1; stream < FAKE_STREAMS; stream++)
        fake_timeline_wait(&device.timeline, stream, 0);
    for (int stream = FAKE_STREAMS - 1; stream >= 0; stream--) {
        device.current = stream;
        look(t, wanted);
    }
    ck_assert_int_eq(device.last_stream, 0);
    teardown_on_device(f);
}

CLIPPED(a_step_on_another_stream_has_the_gradient_multiplied_first) {
    const unsigned char *wanted;
    twin *t = clipped(f, 100, &wanted);
    go_to_stream(1);
    step_with(f, t, wanted);
    ck_assert(memory_is(t, wanted));
    ck_assert_int_eq(atomic_load(&t->tensor->factor->refs), 1);
    ck_assert_int_eq(device.launches, 2);
    ck_assert_int_eq(device.waits, 1);
    ck_assert_int_eq(device.last_stream, 1);
}

CLIPPED(a_second_factor_has_the_first_applied) {
    const unsigned char *one;
    twin *t = clipped(f, 100, &one);
    clip(f, t, 0.7f);
    ck_assert(memory_is(t, one));
    const unsigned char *two = multiplied(t, (double)0.7f, 1.0);
    step_with(f, t, two);
    look(t, two);
}

/* Another optimizer's parameter, with the same gradient. */
static twin *beside(fixture *g, const twin *t) {
    twin *other =
        add_tensor(g, fake_tensor_new(g->host, OF_FLOAT32, t->tensor->numel, 2), 1, false);
    other->tensor->device = OF_CUDA;
    fake_buffer_retain(t->tensor->grad);
    fake_set_grad(other->tensor, t->tensor->grad);
    return other;
}

/* AddressSanitizer sees whose plan was freed too early, or never. */
TESTS(two_optimizers_apply_one_factor, 2) {
    const unsigned char *wanted;
    fixture *f = setup_on_device(OF_FORWARD, 0), *g = setup_beside(f, OF_FORWARD);
    twin *t = clipped(f, 100, &wanted), *other = beside(g, t);
    if (row == 0) {
        step_with(f, t, wanted);
        step_with(g, other, wanted);
        look(t, wanted);
    } else {
        step_with(g, other, wanted);
        OK(of_plan_flush(f->plan));
        ck_assert(memory_is(t, wanted));
    }
    of_plan_drain(f->plan);
    teardown(g);
    teardown_on_device(f);
}

CLIPPED(a_flush_multiplies_all_in_one_launch) {
    for (int i = 0; i < 5; i++)
        with_gradient(f, 100);
    clip_all(f);
    ck_assert_int_eq(device.launches, 0);
    of_plan_flush(f->plan);
    ck_assert_int_eq(device.launches, 1);
    ck_assert_int_eq(device.entries, 5);
    step(f);
}

/* A look at one of four gradients takes along those that no update is to read. */
ON_DEVICE(a_look_at_one_multiplies_others_in_its_launch, OF_FORWARD, OF_BUCKET_NONE) {
    const unsigned char *wanted[4];
    fake_buffer *kept[2];
    for (size_t i = 0; i < 4; i++)
        wanted[i] = multiplied(with_gradient(f, 100), (double)FACTOR, 1.0);
    clip_all(f);
    for (size_t i = 0; i < 2; i++) {
        fake_tensor *without_update = f->twins[2 + i].tensor;
        expect_update_with(f, &f->twins[i], wanted[i]);
        kept[i] = without_update->grad;
        fake_buffer_retain(kept[i]);
        fake_set_grad(without_update, NULL);
    }
    /* One of these is looked at in step() itself, after the first two were given their
     * factor and before their updates are registered. */
    f->twins[2].tensor->used_on_look = kept[0];
    step_only(f);
    ck_assert_int_eq(device.launches, 2);
    ck_assert_int_eq(device.entries, 2);
    ck_assert(!memory_is(&f->twins[0], wanted[0]) && !memory_is(&f->twins[1], wanted[1]));
    for (size_t i = 0; i < 2; i++)
        ck_assert_int_eq(memcmp(kept[i]->data, wanted[2 + i], kept[i]->bytes), 0);
    f->twins[2].tensor->used_on_look = NULL;
    /* Both updates have been launched: one look at a gradient is enough. */
    look(&f->twins[0], wanted[0]);
    ck_assert_int_eq(device.launches, 3);
    ck_assert_int_eq(device.entries, 2);
    ck_assert(memory_is(&f->twins[1], wanted[1]));
    for (size_t i = 0; i < 2; i++)
        fake_buffer_release(kept[i]);
}

CLIPPED(a_gradient_that_is_gone_is_not_multiplied) {
    twin *t = with_gradient(f, 100);
    for (int swept = 0; swept < 2; swept++) {
        clip(f, t, FACTOR);
        fake_set_grad(t->tensor, NULL);
        if (swept)
            of_plan_sweep(f->plan);
        else
            of_plan_flush(f->plan);
        ck_assert_int_eq(device.launches, 0);
        ck_assert_int_eq(atomic_load(&f->host->holds), 0);
        ck_assert_uint_eq(counts(f).in_flight, 0);
        backward(t);
    }
    step(f);
}

CLIPPED(where_nothing_may_wait_the_host_multiplies) {
    twin *t = with_gradient(f, 100);
    of_plan_stop_deferring(f->plan);
    ck_assert(!clip(f, t, FACTOR));
    ck_assert_int_eq(device.launches, 0);
    ck_assert_int_eq(atomic_load(&f->host->holds), 0);
    step(f);
}

CLIPPED(a_graph_does_not_use_what_was_clipped_outside) {
    const unsigned char *wanted;
    twin *t = clipped(f, 100, &wanted);
    device.current = 1;
    device.capture[1] = 3;
    ck_assert_int_eq(of_access(t->tensor->grad, false), OF_ACCESS_FAILED);
    ck_assert(!device.spoiled);
    device.capture[1] = 0;
    device.current = 0;
    look(t, wanted);
    step(f);
}

/* At the use and after; and where it has to be made at once. */
TESTS(a_failed_product_is_an_error, 2) {
    const unsigned char *wanted;
    bool scaled = false;
    fixture *f = setup_on_device(OF_FORWARD, 0);
    device.fail_launch = 1;
    if (row == 0) {
        twin *t = clipped(f, 100, &wanted);
        FAILS(OF_ACCESS_FAILED, of_access(t->tensor->grad, false), "the device is broken");
        FAILS(OF_REFUSED, of_plan_step(f->plan, NULL, 0, NULL), "the device is broken");
    } else {
        twin *t = with_gradient(f, 100);
        t->tensor->factor = fake_buffer_new(sizeof FACTOR);
        memcpy(t->tensor->factor->data, &FACTOR, sizeof FACTOR);
        t->tensor->shared = true;
        FAILS(OF_REFUSED, of_plan_scale(f->plan, t->slot, 0, 0, &scaled), "the device is broken");
    }
    fake_buffer_release(f->twins[0].tensor->factor);
    teardown_unchecked(f);
}
