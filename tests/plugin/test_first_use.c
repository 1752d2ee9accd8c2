/* SPDX-License-Identifier: BSD-3-Clause */
/* Forward fusion: step() leaves updates pending, first use launches them, and
 * no reader sees the difference. */
#include "fixture.h"

FORWARD(step_leaves_updates_pending_until_first_use) {
    twin *a = add(f, 100), *b = add(f, 17);
    train(f);
    ck_assert(!launched(a) && !launched(b) && of_any_pending());
    fake_use(a->tensor->param, false);
    ck_assert(launched(a) && !launched(b));
    ck_assert_uint_eq(counts(f).pending, 1);
    ck_assert_uint_eq(counts(f).at_use, 1);
}

FORWARD(parameter_gradient_and_each_state_launch_the_update) {
    twin *t = add(f, 33);
    for (int which = 0; which < 4; which++) {
        train(f);
        fake_buffer *buffers[] = {t->tensor->param, t->tensor->grad, t->tensor->state[0],
                                  t->tensor->state[1]};
        ck_assert(!launched(t));
        ck_assert(of_access(buffers[which], false));
        ck_assert_msg(launched(t), "key %d did not launch", which);
        ck_assert(!of_access(buffers[which], false));
    }
}

FORWARD(two_hundred_steps_of_every_size_and_dtype_are_bit_equal) {
    static const int64_t sizes[] = {0, 1, 7, 8, 15, 16, 17, 31, 64, 1003, 2048, 2049, 20000};
    for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++)
        for (size_t i = 0; i < LENGTH(sizes); i++)
            add_dtype(f, sizes[i], (of_dtype)dtype);
    for (int i = 0; i < 200; i++) {
        train(f);
        for (size_t k = (size_t)i % 3; k < f->n; k += 3)
            check_twin(&f->twins[k]);
    }
}

FORWARD(large_update_is_split_over_threads_with_equal_bits) {
    twin *t = add(f, 100003);
    for (int threads = 1; threads <= 7; threads++) {
        f->host->n_threads = threads;
        train(f);
        check_twin(t);
        ck_assert_int_eq(atomic_load(&f->host->regions), threads);
    }
}

FORWARD(unknown_memory_is_not_pending) {
    pending(f, 10);
    ck_assert(!of_access(&f, false));
    ck_assert(!of_access(NULL, false));
    ck_assert_uint_eq(counts(f).pending, 1);
}

FORWARD(memory_lives_as_long_as_its_update_is_pending) {
    twin *t = pending(f, 100);
    fake_set_grad(t->tensor, NULL);
    check_twin(t);
}

FORWARD(replaced_memory_keeps_its_own_update) {
    twin *t = pending(f, 100);
    fake_buffer *old = t->tensor->param, *fresh = fake_buffer_new(old->bytes);
    unsigned char wanted[400];
    memcpy(wanted, t->param, sizeof wanted);
    t->tensor->param = fresh;
    memcpy(t->param, fresh->data, fresh->bytes);
    train(f);
    ck_assert_mem_eq(fake_use(old, false), wanted, sizeof wanted);
    fake_buffer_release(old);
}

FORWARD(foreign_thread_ends_deferring) {
    twin *a = add(f, 10), *b = add(f, 10);
    train(f);
    fake_use(a->tensor->param, true);
    ck_assert(counts(f).threads_seen);
    ck_assert_msg(!launched(b), "only the used parameter is launched");
    train(f);
    ck_assert(launched(a) && launched(b) && !of_any_pending());
}

FORWARD(host_can_end_deferring) {
    of_plan_stop_deferring(f->plan);
    ck_assert(launched(pending(f, 10)));
    ck_assert(!counts(f).threads_seen);
}

/* The table of pending memory starts with 1024 places and doubles; AddressSanitizer
 * sees whether the old ones are freed. */
TEST(two_thousand_pending_tensors_find_their_updates) {
    enum { PLANS = 9 };
    fixture *fixtures[PLANS];
    for (int i = 0; i < PLANS; i++) {
        fixtures[i] = setup(OF_FORWARD, OF_BUCKET_NONE);
        for (int k = 0; k < MAX_TWINS; k++)
            add(fixtures[i], 1 + k % 5);
        train(fixtures[i]);
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
