/* SPDX-License-Identifier: BSD-3-Clause */
/* Scalings: a gradient that is to be multiplied is, for whoever looks at it and
 * for every update, though nobody has written it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "scale.h"

static void scale(fixture *f, twin *t, double factor) {
    bool scaled = false;
    ck_assert_msg(of_plan_scale(f->plan, t->slot, factor, NAN, &scaled) == OF_OK, "%s",
                  of_error_message());
    ck_assert(scaled);
}

static unsigned char *gradient_copy(const twin *t) {
    unsigned char *copy = malloc(t->tensor->grad->bytes + 1);
    ck_assert_ptr_nonnull(copy);
    memcpy(copy, t->tensor->grad->data, t->tensor->grad->bytes);
    return copy;
}

static unsigned char *multiplied(const twin *t, const unsigned char *from, double a, double b) {
    const double factors[] = {a, b};
    unsigned char *copy = malloc(t->tensor->grad->bytes + 1);
    ck_assert_ptr_nonnull(copy);
    of_scale_find(t->tensor->dtype, OF_ISA_C)(copy, from, (size_t)t->tensor->numel, factors);
    return copy;
}

static bool memory_is(const twin *t, const unsigned char *bytes) {
    return memcmp(t->tensor->grad->data, bytes, t->tensor->grad->bytes) == 0;
}

/* The twin's update with the gradient multiplied in memory. */
static void step_scaled(fixture *f, twin *t, const unsigned char *raw,
                        const unsigned char *scaled) {
    memcpy(t->tensor->grad->data, scaled, t->tensor->grad->bytes);
    expect_update(f, t);
    memcpy(t->tensor->grad->data, raw, t->tensor->grad->bytes);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
}

static void update_and_reader_see_it(of_dtype dtype, int64_t numel, double a, double b) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add_dtype(f, numel, dtype);
    backward(t);
    unsigned char *raw = gradient_copy(t), *wanted = multiplied(t, raw, a, b);
    scale(f, t, a);
    if (b != 1.0)
        scale(f, t, b);
    ck_assert(memory_is(t, raw));
    step_scaled(f, t, raw, wanted);
    ck_assert_uint_eq(counts(f).pending, 1);
    check_twin(t);
    ck_assert(memory_is(t, raw));
    ck_assert(of_is_scaled(t->tensor->grad));
    fake_use(t->tensor->grad, false);
    ck_assert(memory_is(t, wanted));
    ck_assert(!of_is_scaled(t->tensor->grad));
    free(raw);
    free(wanted);
    teardown(f);
}

START_TEST(an_update_and_a_reader_see_the_gradient_multiplied) {
    static const int64_t sizes[] = {1, 7, 100, 1023, 1024, 1025, 5000, 70001};
    for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (int both = 0; both < 2; both++)
                update_and_reader_see_it((of_dtype)dtype, sizes[i], 0.3, both ? 0.7 : 1.0);
}
END_TEST

START_TEST(a_reader_before_step_ends_it) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 3000);
    backward(t);
    unsigned char *raw = gradient_copy(t), *wanted = multiplied(t, raw, 0.3, 1.0);
    scale(f, t, 0.3);
    fake_use(t->tensor->grad, false);
    ck_assert(memory_is(t, wanted));
    step(f);
    free(raw);
    free(wanted);
    teardown(f);
}
END_TEST

START_TEST(the_update_is_launched_before_its_gradient_changes) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 3000);
    backward(t);
    unsigned char *raw = gradient_copy(t), *wanted = multiplied(t, raw, 0.3, 1.0);
    scale(f, t, 0.3);
    step_scaled(f, t, raw, wanted);
    fake_use(t->tensor->grad, false);
    ck_assert(launched(t) && memory_is(t, wanted));
    step(f); /* again with the same gradient, now multiplied in memory */
    free(raw);
    free(wanted);
    teardown(f);
}
END_TEST

START_TEST(a_third_factor_is_taken_after_the_first_two_are_applied) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 50);
    backward(t);
    unsigned char *raw = gradient_copy(t), *two = multiplied(t, raw, 0.3, 0.7);
    unsigned char *three = multiplied(t, two, 0.9, 1.0);
    scale(f, t, 0.3);
    scale(f, t, 0.7);
    ck_assert(memory_is(t, raw));
    scale(f, t, 0.9);
    ck_assert(memory_is(t, two));
    fake_use(t->tensor->grad, false);
    ck_assert(memory_is(t, three));
    free(raw);
    free(two);
    free(three);
    teardown(f);
}
END_TEST

START_TEST(what_others_may_see_is_multiplied_at_once) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 50);
    t->tensor->shared = true;
    backward(t);
    unsigned char *raw = gradient_copy(t), *wanted = multiplied(t, raw, 0.3, 1.0);
    scale(f, t, 0.3);
    ck_assert(memory_is(t, wanted));
    step(f);
    free(raw);
    free(wanted);
    teardown(f);
}
END_TEST

typedef void end_fn(fixture *f);

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

START_TEST(what_launches_all_updates_ends_all_scalings) {
    static end_fn *const ends[] = {end_flush, end_flush_all, end_clear, end_fork};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        for (int stepped = 0; stepped < 2; stepped++) {
            fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
            twin *t = add(f, 3000);
            backward(t);
            unsigned char *raw = gradient_copy(t), *wanted = multiplied(t, raw, 0.3, 1.0);
            scale(f, t, 0.3);
            if (stepped)
                step_scaled(f, t, raw, wanted);
            ends[i](f);
            ck_assert(memory_is(t, wanted) && launched(t));
            free(raw);
            free(wanted);
            teardown(f);
        }
}
END_TEST

START_TEST(a_gradient_that_is_gone_is_forgotten) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 3000);
    for (int i = 0; i < 3; i++) {
        backward(t);
        scale(f, t, 0.3);
        fake_set_grad(t->tensor, NULL);
        ck_assert_int_eq(atomic_load(&f->host->holds), 1);
        of_plan_sweep(f->plan);
        ck_assert_int_eq(atomic_load(&f->host->holds), 0);
    }
    backward(t);
    scale(f, t, 0.3);
    fake_set_grad(t->tensor, NULL);
    of_plan_flush(f->plan);
    teardown(f);
}
END_TEST

START_TEST(a_living_gradient_is_not_swept) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 30);
    backward(t);
    scale(f, t, 0.3);
    of_plan_sweep(f->plan);
    ck_assert(of_is_scaled(t->tensor->grad));
    teardown(f);
}
END_TEST

START_TEST(nothing_to_scale_is_said) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 30);
    bool scaled = true;
    ck_assert_int_eq(of_plan_scale(f->plan, t->slot, 0.3, NAN, &scaled), OF_OK);
    ck_assert(!scaled);
    ck_assert_int_eq(of_plan_scale(f->plan, 99, 0.3, NAN, &scaled), OF_INVALID);
    teardown(f);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("scale");
    TCase *tests = tcase_create("scale");
    tcase_add_test(tests, an_update_and_a_reader_see_the_gradient_multiplied);
    tcase_add_test(tests, a_reader_before_step_ends_it);
    tcase_add_test(tests, the_update_is_launched_before_its_gradient_changes);
    tcase_add_test(tests, a_third_factor_is_taken_after_the_first_two_are_applied);
    tcase_add_test(tests, what_others_may_see_is_multiplied_at_once);
    tcase_add_test(tests, what_launches_all_updates_ends_all_scalings);
    tcase_add_test(tests, a_gradient_that_is_gone_is_forgotten);
    tcase_add_test(tests, a_living_gradient_is_not_swept);
    tcase_add_test(tests, nothing_to_scale_is_said);
    suite_add_tcase(suite, tests);
    return run(suite);
}
