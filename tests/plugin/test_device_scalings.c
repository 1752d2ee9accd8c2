/* SPDX-License-Identifier: BSD-3-Clause */
/* Scalings on a device: the factor is there too, and nobody waits for it. Whoever
 * looks at a gradient finds it multiplied, in the order that the program keeps. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fake_device.h"
#include "fixture.h"
#include "scale.h"

static const float FACTOR = 0.3f;

static void finish(fixture *f) {
    ck_assert_msg(device.timeline.races == 0, "%d races, first: %s", device.timeline.races,
                  device.timeline.first_race);
    for (size_t i = 0; i < f->n; i++) {
        fake_buffer_release(f->twins[i].tensor->factor);
        f->twins[i].tensor->factor = NULL;
    }
    teardown(f);
    ck_assert_int_eq(device.events, 0);
}

/* As clipping does on the current stream. */
static bool clip(fixture *f, twin *t, float factor) {
    bool scaled = false;
    fake_buffer_release(t->tensor->factor);
    t->tensor->factor = fake_buffer_new(sizeof factor);
    memcpy(t->tensor->factor->data, &factor, sizeof factor);
    fake_timeline_access(&device.timeline, device.current, t->tensor->factor->data, true, "clip");
    ck_assert_int_eq(of_plan_scale(f->plan, t->slot, NAN, NAN, &scaled), OF_OK);
    return scaled;
}

static twin *with_gradient(fixture *f, int64_t numel) {
    twin *t = add_on_device(f, numel, 0);
    backward(t);
    fake_operator(t->tensor->grad, true, "backward");
    return t;
}

static unsigned char *multiplied(const twin *t, double by) {
    const fake_buffer *grad = t->tensor->grad;
    const double factors[] = {by, 1.0};
    unsigned char *copy = malloc(grad->bytes);
    ck_assert_ptr_nonnull(copy);
    of_scale_find(t->tensor->dtype, OF_ISA_C)(copy, grad->data, (size_t)t->tensor->numel, factors);
    return copy;
}

static bool memory_is(const twin *t, const unsigned char *bytes) {
    return memcmp(t->tensor->grad->data, bytes, t->tensor->grad->bytes) == 0;
}

/* step(), and what the twin becomes by a gradient of these bytes. */
static void step_with(fixture *f, twin *t, const unsigned char *bytes) {
    fake_buffer *grad = t->tensor->grad;
    unsigned char *raw = malloc(grad->bytes);
    ck_assert_ptr_nonnull(raw);
    memcpy(raw, grad->data, grad->bytes);
    memcpy(grad->data, bytes, grad->bytes);
    expect_update(f, t);
    memcpy(grad->data, raw, grad->bytes);
    free(raw);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
}

START_TEST(the_update_applies_the_factor_and_a_reader_sees_it) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = with_gradient(f, 3000);
    unsigned char *wanted = multiplied(t, FACTOR);
    ck_assert(clip(f, t, FACTOR));
    ck_assert_int_eq(device.launches, 0);
    step_with(f, t, wanted);
    fake_operator(t->tensor->param, false, "use");
    ck_assert_int_eq(device.launches, 1);
    ck_assert(!memory_is(t, wanted));
    ck_assert(of_is_scaled(t->tensor->grad));
    fake_operator(t->tensor->grad, false, "look");
    ck_assert_int_eq(device.launches, 2);
    ck_assert(memory_is(t, wanted));
    ck_assert(!of_is_scaled(t->tensor->grad));
    fake_operator(t->tensor->grad, false, "look");
    ck_assert_int_eq(device.launches, 2);
    free(wanted);
    finish(f);
}
END_TEST

START_TEST(a_reader_before_step_leaves_the_update_without_factor) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = with_gradient(f, 100);
    unsigned char *wanted = multiplied(t, FACTOR);
    clip(f, t, FACTOR);
    fake_operator(t->tensor->grad, false, "look");
    ck_assert(memory_is(t, wanted));
    step(f);
    free(wanted);
    finish(f);
}
END_TEST

START_TEST(the_update_keeps_the_factor_alive) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = with_gradient(f, 100);
    unsigned char *wanted = multiplied(t, FACTOR);
    clip(f, t, FACTOR);
    ck_assert_int_eq(atomic_load(&t->tensor->factor->refs), 2);
    step_with(f, t, wanted);
    ck_assert_int_eq(atomic_load(&t->tensor->factor->refs), 3);
    of_plan_flush(f->plan);
    ck_assert_int_eq(atomic_load(&t->tensor->factor->refs), 1);
    free(wanted);
    finish(f);
}
END_TEST

/* They look after a wait that was made before anything was launched. */
static void other_streams_look(bool stepped) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = with_gradient(f, 100);
    unsigned char *wanted = multiplied(t, FACTOR);
    clip(f, t, FACTOR);
    if (stepped)
        step_with(f, t, wanted);
    for (int stream = 1; stream < FAKE_STREAMS; stream++)
        fake_timeline_wait(&device.timeline, stream, 0);
    for (int stream = FAKE_STREAMS - 1; stream >= 0; stream--) {
        device.current = stream;
        fake_operator(t->tensor->grad, false, "look");
    }
    ck_assert_int_eq(device.last_stream, 0);
    ck_assert(memory_is(t, wanted));
    free(wanted);
    finish(f);
}

START_TEST(other_streams_wait_for_the_product) {
    other_streams_look(false);
    other_streams_look(true);
}
END_TEST

START_TEST(a_step_on_another_stream_has_the_gradient_multiplied_first) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = with_gradient(f, 100);
    unsigned char *wanted = multiplied(t, FACTOR);
    clip(f, t, FACTOR);
    fake_timeline_wait(&device.timeline, 1, 0);
    device.current = 1;
    step_with(f, t, wanted);
    ck_assert(memory_is(t, wanted));
    ck_assert_int_eq(device.last_stream, 0);
    ck_assert_int_eq(atomic_load(&t->tensor->factor->refs), 1);
    fake_operator(t->tensor->param, false, "use");
    ck_assert_int_eq(device.last_stream, 1);
    free(wanted);
    finish(f);
}
END_TEST

START_TEST(a_second_factor_has_the_first_applied) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = with_gradient(f, 100);
    unsigned char *one = multiplied(t, FACTOR);
    clip(f, t, FACTOR);
    clip(f, t, 0.7f);
    ck_assert(memory_is(t, one));
    unsigned char *two = multiplied(t, 0.7f);
    step_with(f, t, two);
    fake_operator(t->tensor->grad, false, "look");
    ck_assert(memory_is(t, two));
    free(one);
    free(two);
    finish(f);
}
END_TEST

START_TEST(two_optimizers_apply_one_factor) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    fixture *g = setup_beside(f, OF_FORWARD);
    twin *t = with_gradient(f, 100);
    twin *other = add_tensor(g, fake_tensor_new(f->host, OF_FLOAT32, 100, 2), 1, false);
    other->tensor->device = OF_CUDA;
    fake_buffer_retain(t->tensor->grad);
    fake_set_grad(other->tensor, t->tensor->grad);
    unsigned char *wanted = multiplied(t, FACTOR);
    clip(f, t, FACTOR);
    step_with(f, t, wanted);
    step_with(g, other, wanted);
    fake_operator(t->tensor->grad, false, "look");
    ck_assert(memory_is(t, wanted));
    free(wanted);
    of_plan_drain(f->plan);
    teardown(g);
    finish(f);
}
END_TEST

/* One's update of the shared gradient is in flight when the other's product is launched.
 * AddressSanitizer sees whose plan was freed too early, or never. */
START_TEST(a_flush_keeps_the_plans_of_both_optimizers) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    fixture *g = setup_beside(f, OF_FORWARD);
    twin *t = with_gradient(f, 100);
    twin *other = add_tensor(g, fake_tensor_new(f->host, OF_FLOAT32, 100, 2), 1, false);
    other->tensor->device = OF_CUDA;
    fake_buffer_retain(t->tensor->grad);
    fake_set_grad(other->tensor, t->tensor->grad);
    unsigned char *wanted = multiplied(t, FACTOR);
    clip(f, t, FACTOR);
    step_with(g, other, wanted);
    fake_operator(other->tensor->param, false, "use");
    ck_assert_uint_eq(counts(g).in_flight, 1);
    ck_assert_int_eq(of_plan_flush(f->plan), OF_OK);
    ck_assert(memory_is(t, wanted));
    free(wanted);
    of_plan_drain(f->plan);
    teardown(g);
    finish(f);
}
END_TEST

START_TEST(a_flush_multiplies_all_in_one_launch) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    fake_buffer *factor = NULL;
    for (int i = 0; i < 5; i++) {
        twin *t = with_gradient(f, 100);
        bool scaled = false;
        if (!factor) {
            clip(f, t, FACTOR);
            factor = t->tensor->factor;
            continue;
        }
        fake_buffer_retain(factor);
        t->tensor->factor = factor;
        ck_assert_int_eq(of_plan_scale(f->plan, t->slot, NAN, NAN, &scaled), OF_OK);
    }
    ck_assert_int_eq(device.launches, 0);
    of_plan_flush(f->plan);
    ck_assert_int_eq(device.launches, 1);
    ck_assert_int_eq(device.entries, 5);
    step(f);
    finish(f);
}
END_TEST

/* A look at one of four gradients takes along those that no update is to read. */
START_TEST(a_look_at_one_multiplies_others_in_its_launch) {
    fixture *f = setup_on_device(OF_FORWARD, OF_BUCKET_NONE);
    unsigned char *wanted[4];
    for (int i = 0; i < 4; i++) {
        twin *t = with_gradient(f, 100);
        wanted[i] = multiplied(t, FACTOR);
    }
    fake_buffer *factor = NULL;
    for (size_t i = 0; i < f->n; i++) {
        twin *t = &f->twins[i];
        bool scaled = false;
        if (factor) {
            fake_buffer_retain(factor);
            t->tensor->factor = factor;
            ck_assert_int_eq(of_plan_scale(f->plan, t->slot, NAN, NAN, &scaled), OF_OK);
        } else {
            clip(f, t, FACTOR);
            factor = t->tensor->factor;
        }
    }
    for (size_t i = 0; i < 2; i++) {
        unsigned char *raw = multiplied(&f->twins[i], 1.0);
        memcpy(f->twins[i].tensor->grad->data, wanted[i], f->twins[i].tensor->grad->bytes);
        expect_update(f, &f->twins[i]);
        memcpy(f->twins[i].tensor->grad->data, raw, f->twins[i].tensor->grad->bytes);
        free(raw);
    }
    fake_buffer *kept[2];
    for (size_t i = 0; i < 2; i++) { /* without an update */
        kept[i] = f->twins[2 + i].tensor->grad;
        fake_buffer_retain(kept[i]);
        fake_set_grad(f->twins[2 + i].tensor, NULL);
    }
    /* One of these is looked at in step() itself, after the first two were given their
     * factor and before their updates are registered. */
    f->twins[2].tensor->used_on_look = kept[0];
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
    ck_assert_int_eq(device.launches, 1);
    ck_assert_int_eq(device.entries, 2);
    ck_assert(!memory_is(&f->twins[0], wanted[0]) && !memory_is(&f->twins[1], wanted[1]));
    for (size_t i = 0; i < 2; i++)
        ck_assert_int_eq(memcmp(kept[i]->data, wanted[2 + i], kept[i]->bytes), 0);
    f->twins[2].tensor->used_on_look = NULL;
    /* Once both updates have been launched, one look at a gradient is enough. */
    for (size_t i = 0; i < 2; i++)
        fake_operator(f->twins[i].tensor->param, false, "use");
    const int before = device.launches;
    fake_operator(f->twins[0].tensor->grad, false, "look");
    ck_assert_int_eq(device.launches, before + 1);
    ck_assert_int_eq(device.entries, 2);
    ck_assert(memory_is(&f->twins[0], wanted[0]) && memory_is(&f->twins[1], wanted[1]));
    for (size_t i = 0; i < 2; i++)
        fake_buffer_release(kept[i]);
    for (int i = 0; i < 4; i++)
        free(wanted[i]);
    finish(f);
}
END_TEST

START_TEST(a_gradient_that_is_gone_is_not_multiplied) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
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
    finish(f);
}
END_TEST

START_TEST(where_nothing_may_wait_the_host_multiplies) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = with_gradient(f, 100);
    of_plan_stop_deferring(f->plan);
    ck_assert(!clip(f, t, FACTOR));
    ck_assert_int_eq(device.launches, 0);
    ck_assert_int_eq(atomic_load(&f->host->holds), 0);
    step(f);
    finish(f);
}
END_TEST

START_TEST(a_graph_does_not_use_what_was_clipped_outside) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = with_gradient(f, 100);
    clip(f, t, FACTOR);
    device.current = 1;
    device.capture[1] = 3;
    ck_assert_int_eq(of_access(t->tensor->grad, false), OF_ACCESS_FAILED);
    ck_assert(!device.spoiled);
    device.capture[1] = 0;
    device.current = 0;
    fake_operator(t->tensor->grad, false, "look");
    step(f);
    finish(f);
}
END_TEST

START_TEST(a_failed_product_is_an_error_at_the_use_and_after) {
    fixture *f = setup_on_device(OF_FORWARD, 0);
    twin *t = with_gradient(f, 100);
    clip(f, t, FACTOR);
    device.fail_launch = 1;
    ck_assert_int_eq(of_access(t->tensor->grad, false), OF_ACCESS_FAILED);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_REFUSED);
    fake_buffer_release(t->tensor->factor);
    teardown_unchecked(f);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("device-scale");
    TCase *tests = tcase_create("device-scale");
    tcase_add_test(tests, the_update_applies_the_factor_and_a_reader_sees_it);
    tcase_add_test(tests, a_reader_before_step_leaves_the_update_without_factor);
    tcase_add_test(tests, the_update_keeps_the_factor_alive);
    tcase_add_test(tests, other_streams_wait_for_the_product);
    tcase_add_test(tests, a_step_on_another_stream_has_the_gradient_multiplied_first);
    tcase_add_test(tests, a_second_factor_has_the_first_applied);
    tcase_add_test(tests, two_optimizers_apply_one_factor);
    tcase_add_test(tests, a_flush_keeps_the_plans_of_both_optimizers);
    tcase_add_test(tests, a_flush_multiplies_all_in_one_launch);
    tcase_add_test(tests, a_look_at_one_multiplies_others_in_its_launch);
    tcase_add_test(tests, a_gradient_that_is_gone_is_not_multiplied);
    tcase_add_test(tests, where_nothing_may_wait_the_host_multiplies);
    tcase_add_test(tests, a_graph_does_not_use_what_was_clipped_outside);
    tcase_add_test(tests, a_failed_product_is_an_error_at_the_use_and_after);
    suite_add_tcase(suite, tests);
    return run(suite);
}
