/* SPDX-License-Identifier: BSD-3-Clause */
/* Forward fusion: step() leaves updates pending, first use launches them, and
 * no reader sees the difference. */
#include <string.h>

#include "fixture.h"

START_TEST(step_leaves_updates_pending_until_first_use) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *a = add(f, 100);
    twin *b = add(f, 17);
    backward_all(f);
    step(f);
    ck_assert(!launched(a) && !launched(b));
    ck_assert(of_any_pending());
    fake_use(a->tensor->param, false);
    ck_assert(launched(a) && !launched(b));
    ck_assert_uint_eq(counts(f).pending, 1);
    ck_assert_uint_eq(counts(f).at_use, 1);
    teardown(f);
}
END_TEST

START_TEST(parameter_gradient_and_each_state_launch_the_update) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 33);
    for (int which = 0; which < 4; which++) {
        backward(t);
        step(f);
        fake_buffer *buffers[] = {t->tensor->param, t->tensor->grad, t->tensor->state[0],
                                  t->tensor->state[1]};
        ck_assert(!launched(t));
        ck_assert(of_access(buffers[which], false));
        ck_assert_msg(launched(t), "key %d did not launch", which);
        ck_assert(!of_access(buffers[which], false));
    }
    teardown(f);
}
END_TEST

START_TEST(two_hundred_steps_of_every_size_and_dtype_are_bit_equal) {
    static const int64_t sizes[] = {0, 1, 7, 8, 15, 16, 17, 31, 64, 1003, 2048, 2049, 20000};
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            add_dtype(f, sizes[i], (of_dtype)dtype);
    for (int i = 0; i < 200; i++) {
        backward_all(f);
        step(f);
        for (size_t k = (size_t)i % 3; k < f->n; k += 3)
            check_twin(&f->twins[k]);
    }
    teardown(f);
}
END_TEST

START_TEST(large_update_is_split_over_threads_with_equal_bits) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 100003);
    for (int threads = 1; threads <= 7; threads++) {
        f->host->n_threads = threads;
        backward(t);
        step(f);
        check_twin(t);
        ck_assert_int_eq(atomic_load(&f->host->regions), threads);
    }
    teardown(f);
}
END_TEST

START_TEST(unknown_memory_is_not_pending) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 10);
    backward(t);
    step(f);
    ck_assert(!of_access(&f, false));
    ck_assert(!of_access(NULL, false));
    ck_assert_uint_eq(counts(f).pending, 1);
    teardown(f);
}
END_TEST

START_TEST(memory_lives_as_long_as_its_update_is_pending) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 100);
    backward(t);
    step(f);
    fake_set_grad(t->tensor, NULL);
    check_twin(t);
    teardown(f);
}
END_TEST

START_TEST(replaced_memory_keeps_its_own_update) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 100);
    backward(t);
    step(f);
    fake_buffer *old = t->tensor->param;
    fake_buffer_retain(old);
    fake_buffer *fresh = fake_buffer_new(old->bytes);
    unsigned char wanted[400];
    memcpy(wanted, t->param, sizeof wanted);
    t->tensor->param = fresh;
    memcpy(t->param, fresh->data, fresh->bytes);
    fake_buffer_release(old);
    backward(t);
    step(f);
    ck_assert_mem_eq(fake_use(old, false), wanted, sizeof wanted);
    fake_buffer_release(old);
    teardown(f);
}
END_TEST

START_TEST(foreign_thread_ends_deferring) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *a = add(f, 10);
    twin *b = add(f, 10);
    backward_all(f);
    step(f);
    fake_use(a->tensor->param, true);
    ck_assert(counts(f).threads_seen);
    ck_assert_msg(!launched(b), "only the used parameter is launched");
    backward_all(f);
    step(f);
    ck_assert(launched(a) && launched(b));
    ck_assert(!of_any_pending());
    teardown(f);
}
END_TEST

START_TEST(host_can_end_deferring) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 10);
    of_plan_stop_deferring(f->plan);
    backward(t);
    step(f);
    ck_assert(launched(t));
    ck_assert(!counts(f).threads_seen);
    teardown(f);
}
END_TEST

/* The table of pending memory starts with 1024 places and doubles; AddressSanitizer
 * sees whether the old ones are freed. */
START_TEST(two_thousand_pending_tensors_find_their_updates) {
    enum { PLANS = 9 };
    fixture *fixtures[PLANS];
    for (int i = 0; i < PLANS; i++) {
        fixtures[i] = setup(OF_FORWARD, OF_BUCKET_NONE);
        for (int k = 0; k < MAX_TWINS; k++)
            add(fixtures[i], 1 + k % 5);
        backward_all(fixtures[i]);
        step(fixtures[i]);
        ck_assert_uint_eq(counts(fixtures[i]).pending, MAX_TWINS);
    }
    for (int i = PLANS; i-- > 0;) {
        for (size_t k = 0; k < fixtures[i]->n; k += 2)
            check_twin(&fixtures[i]->twins[k]);
        ck_assert_uint_eq(counts(fixtures[i]).pending, MAX_TWINS / 2);
    }
    for (int i = 0; i < PLANS; i++)
        teardown_unchecked(fixtures[i]);
    ck_assert(!of_any_pending());
}
END_TEST

int main(void) {
    Suite *suite = suite_create("first use");
    TCase *tests = tcase_create("first use");
    tcase_set_timeout(tests, 120);
    tcase_add_test(tests, step_leaves_updates_pending_until_first_use);
    tcase_add_test(tests, parameter_gradient_and_each_state_launch_the_update);
    tcase_add_test(tests, two_hundred_steps_of_every_size_and_dtype_are_bit_equal);
    tcase_add_test(tests, large_update_is_split_over_threads_with_equal_bits);
    tcase_add_test(tests, unknown_memory_is_not_pending);
    tcase_add_test(tests, memory_lives_as_long_as_its_update_is_pending);
    tcase_add_test(tests, replaced_memory_keeps_its_own_update);
    tcase_add_test(tests, foreign_thread_ends_deferring);
    tcase_add_test(tests, host_can_end_deferring);
    tcase_add_test(tests, two_thousand_pending_tensors_find_their_updates);
    suite_add_tcase(suite, tests);
    return run(suite);
}
