/* SPDX-License-Identifier: BSD-3-Clause */
/* Forward fusion: step() leaves updates pending, first use launches them, and
 * no reader sees the difference. */
#include <string.h>

#include "fixture.h"

START_TEST(step_leaves_updates_pending_until_first_use) {
    fixture *f = setup(OF_FORWARD, 0);
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
    fixture *f = setup(OF_FORWARD, 0);
    twin *t = add(f, 33);
    for (int which = 0; which < 4; which++) {
        backward(t);
        step(f);
        fake_buffer *buffers[] = {t->tensor->param, t->tensor->grad, t->tensor->state[0],
                                  t->tensor->state[1]};
        ck_assert(!launched(t));
        ck_assert(of_touch(buffers[which], false));
        ck_assert_msg(launched(t), "key %d did not launch", which);
        ck_assert(!of_touch(buffers[which], false));
    }
    teardown(f);
}
END_TEST

START_TEST(two_hundred_steps_of_every_size_and_dtype_are_bit_equal) {
    static const int64_t sizes[] = {0, 1, 7, 8, 15, 16, 17, 31, 64, 1003, 2048, 2049, 20000};
    fixture *f = setup(OF_FORWARD, 0);
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
    fixture *f = setup(OF_FORWARD, 0);
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

START_TEST(flush_launches_all_in_one_region) {
    fixture *f = setup(OF_FORWARD, 0);
    for (int i = 0; i < 20; i++)
        add(f, 1000 + i);
    backward_all(f);
    step(f);
    of_plan_flush(f->plan);
    for (size_t i = 0; i < f->n; i++)
        ck_assert(launched(&f->twins[i]));
    ck_assert_uint_eq(counts(f).at_close, 20);
    ck_assert_uint_eq(counts(f).launches, 1);
    ck_assert_int_eq(atomic_load(&f->host->regions), 1);
    ck_assert(!of_any_pending());
    teardown(f);
}
END_TEST

START_TEST(small_updates_need_no_threads) {
    fixture *f = setup(OF_FORWARD, 0);
    for (int i = 0; i < 10; i++)
        add(f, 50);
    backward_all(f);
    step(f);
    of_plan_flush(f->plan);
    ck_assert_uint_eq(counts(f).launches, 1);
    ck_assert_int_eq(atomic_load(&f->host->regions), 0);
    teardown(f);
}
END_TEST

START_TEST(flush_all_reaches_every_plan) {
    fixture *f = setup(OF_FORWARD, 0);
    fixture *g = setup_beside(f, OF_FORWARD);
    twin *a = add(f, 10);
    twin *b = add(g, 10);
    backward_all(f);
    backward_all(g);
    step(f);
    step(g);
    of_flush_all();
    ck_assert(launched(a) && launched(b));
    ck_assert(!of_any_pending());
    teardown(g);
    teardown(f);
}
END_TEST

START_TEST(step_again_launches_what_is_still_pending_first) {
    fixture *f = setup(OF_FORWARD, 0);
    twin *t = add(f, 100);
    for (int i = 0; i < 5; i++) {
        backward(t);
        step(f);
    }
    ck_assert_uint_eq(counts(f).at_close, 4);
    ck_assert_uint_eq(counts(f).pending, 1);
    teardown(f);
}
END_TEST

START_TEST(step_again_with_the_same_gradient_applies_it_twice) {
    fixture *f = setup(OF_FORWARD, 0);
    twin *t = add(f, 100);
    backward(t);
    step(f);
    step(f);
    check_twin(t);
    ck_assert_uint_eq(counts(f).created, 2);
    teardown(f);
}
END_TEST

START_TEST(parameter_without_gradient_is_left_alone) {
    fixture *f = setup(OF_FORWARD, 0);
    twin *a = add(f, 10);
    twin *b = add(f, 10);
    backward(b);
    step(f);
    ck_assert(!of_touch(a->tensor->param, false));
    check_twin(b);
    teardown(f);
}
END_TEST

START_TEST(life_of_an_update_in_order) {
    fixture *f = setup(OF_FORWARD, 0);
    twin *a = add(f, 10);
    add(f, 10)->tensor->shared = true;
    backward_all(f);
    fake_record(f->host);
    step(f);
    ck_assert_str_eq(fake_events(f->host), "collect:0 collect:1 commit:0 commit:1 defer:0 refuse:1 "
                                           "settle:1 release:1");
    fake_use(a->tensor->param, false);
    ck_assert_str_eq(fake_events(f->host), "settle:0 release:0");
    teardown(f);
}
END_TEST

START_TEST(shared_memory_is_updated_at_once) {
    fixture *f = setup(OF_FORWARD, 0);
    twin *t = add(f, 10);
    t->tensor->shared = true;
    backward(t);
    step(f);
    ck_assert(launched(t));
    ck_assert(!of_any_pending());
    ck_assert_uint_eq(counts(f).at_once, 1);
    teardown(f);
}
END_TEST

START_TEST(what_must_go_alone_is_committed_launched_and_released_before_the_next) {
    fixture *f = setup(OF_FORWARD, 0);
    for (int i = 0; i < 4; i++)
        add(f, 10)->tensor->alone = i > 1;
    f->twins[1].tensor->shared = true;
    backward_all(f);
    fake_record(f->host);
    step(f);
    ck_assert_str_eq(fake_events(f->host),
                     "collect:0 collect:1 collect:2 collect:3 commit:0 commit:1 defer:0 refuse:1 "
                     "settle:1 commit:2 settle:2 release:2 commit:3 settle:3 release:3 release:1");
    ck_assert_uint_eq(counts(f).at_once, 3);
    ck_assert_uint_eq(counts(f).launches, 3);
    teardown(f);
}
END_TEST

START_TEST(eager_parameter_is_updated_at_once) {
    fixture *f = setup(OF_FORWARD, 0);
    twin *eager = add_eager(f, 10);
    twin *lazy = add(f, 10);
    backward_all(f);
    step(f);
    ck_assert(launched(eager) && !launched(lazy));
    teardown(f);
}
END_TEST

START_TEST(updates_at_once_share_one_region) {
    fixture *f = setup(OF_FORWARD, 0);
    for (int i = 0; i < 10; i++)
        add_eager(f, i % 2 ? 100 : 20000);
    backward_all(f);
    step(f);
    ck_assert_uint_eq(counts(f).launches, 1);
    ck_assert_int_eq(atomic_load(&f->host->regions), 1);
    teardown(f);
}
END_TEST

START_TEST(shared_gradient_buffer_does_not_break_up_the_region) {
    fixture *f = setup(OF_FORWARD, 0);
    twin *a = add(f, 100);
    twin *b = add(f, 100);
    a->tensor->shared = b->tensor->shared = true;
    backward(a);
    fake_buffer_retain(a->tensor->grad);
    fake_set_grad(b->tensor, a->tensor->grad);
    step(f);
    ck_assert_uint_eq(counts(f).launches, 1);
    teardown(f);
}
END_TEST

/* The same parameter twice in one optimizer: stock updates it twice, in order. */
static void alias_in_one_plan(bool shared, bool eager) {
    fixture *f = setup(OF_FORWARD, 0);
    twin *a = add(f, 30000);
    fake_tensor *alias = fake_tensor_alias(a->tensor);
    twin *b = add_tensor(f, alias, 0, eager);
    a->tensor->shared = alias->shared = shared;
    for (int i = 0; i < 3; i++) {
        void *state[] = {b->state[0], b->state[1]};
        backward_all(f);
        expect_update(f, a);
        expect_update_at(b, a->param, state);
        ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
    }
    memcpy(b->param, a->param, alias->param->bytes);
    check_twin(b);
    teardown(f);
}

START_TEST(aliased_parameters_are_updated_in_order) {
    alias_in_one_plan(false, false);
    alias_in_one_plan(true, false);
    alias_in_one_plan(false, true);
    alias_in_one_plan(true, true);
}
END_TEST

START_TEST(two_optimizers_on_one_parameter_are_updated_in_order) {
    fixture *f = setup(OF_FORWARD, 0);
    fixture *g = setup_beside(f, OF_FORWARD);
    twin *a = add(f, 1000);
    twin *b = add_tensor(g, fake_tensor_alias(a->tensor), 1, false);
    for (int i = 0; i < 3; i++) {
        void *state[] = {b->state[0], b->state[1]};
        backward(a);
        backward(b);
        step(f);
        expect_update_at(b, a->param, state);
        ck_assert_int_eq(of_plan_step(g->plan, NULL, 0, NULL), OF_OK);
        ck_assert_uint_eq(counts(f).pending, 0);
        ck_assert_uint_eq(counts(g).pending, 1);
    }
    memcpy(b->param, a->param, a->tensor->param->bytes);
    check_twin(b);
    teardown(g);
    teardown(f);
}
END_TEST

START_TEST(replaced_memory_keeps_its_own_update) {
    fixture *f = setup(OF_FORWARD, 0);
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

START_TEST(scalars_are_those_of_step_not_of_launch) {
    fixture *f = setup(OF_FORWARD, 0);
    twin *a = add(f, 100);
    twin *b = add_to_group(f, 100, 1);
    backward_all(f);
    step(f);
    set_lr(f, 0, 0.5);
    set_lr(f, 1, 0.25);
    check_twin(a);
    check_twin(b);
    backward_all(f);
    step(f);
    ck_assert_double_eq(of_plan_hyper(f->plan, a->slot)[0], 0.5);
    ck_assert_double_eq(of_plan_hyper(f->plan, b->slot)[0], 0.25);
    teardown(f);
}
END_TEST

START_TEST(parameters_of_one_group_may_be_at_different_steps) {
    fixture *f = setup(OF_FORWARD, 0);
    for (int i = 0; i < 6; i++)
        add(f, 20);
    for (size_t round = 1; round < 6; round++) {
        for (size_t i = 0; i < f->n; i += round)
            backward(&f->twins[i]);
        step(f);
        for (size_t i = 0; i < f->n; i++)
            fake_set_grad(f->twins[i].tensor, NULL);
    }
    teardown(f);
}
END_TEST

START_TEST(memory_lives_as_long_as_its_update_is_pending) {
    fixture *f = setup(OF_FORWARD, 0);
    twin *t = add(f, 100);
    backward(t);
    step(f);
    fake_set_grad(t->tensor, NULL);
    check_twin(t);
    teardown(f);
}
END_TEST

START_TEST(missing_state_is_reported_before_anything_changes) {
    fixture *f = setup(OF_FORWARD, 0);
    for (int i = 0; i < 4; i++)
        add(f, 10);
    backward_all(f);
    f->twins[1].tensor->lacks_state = f->twins[3].tensor->lacks_state = true;
    size_t needs[1] = {99};
    size_t n_needs = 0;
    fake_record(f->host);
    ck_assert_int_eq(of_plan_step(f->plan, needs, 1, &n_needs), OF_NEEDS_STATE);
    ck_assert_uint_eq(n_needs, 2);
    ck_assert_uint_eq(needs[0], f->twins[1].slot);
    ck_assert_str_eq(fake_events(f->host),
                     "collect:0 collect:1 collect:2 collect:3 release:0 release:2");
    ck_assert(!of_any_pending());
    f->twins[1].tensor->lacks_state = f->twins[3].tensor->lacks_state = false;
    step(f);
    teardown(f);
}
END_TEST

START_TEST(failed_step_changes_nothing) {
    fixture *f = setup(OF_FORWARD, 0);
    for (int i = 0; i < 3; i++)
        add(f, 10);
    backward_all(f);
    f->twins[0].tensor->lacks_state = true;
    f->twins[2].tensor->broken = true;
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_INVALID);
    ck_assert_str_eq(of_error_message(), "tensor 2 is broken");
    ck_assert(!of_any_pending());
    ck_assert_int_eq(atomic_load(&f->host->holds), 0);
    ck_assert_uint_eq(counts(f).created, 0);
    f->twins[0].tensor->lacks_state = f->twins[2].tensor->broken = false;
    step(f);
    teardown(f);
}
END_TEST

START_TEST(collect_may_use_pending_memory_of_any_plan) {
    fixture *f = setup(OF_FORWARD, 0);
    fixture *g = setup_beside(f, OF_FORWARD);
    twin *a = add(f, 10);
    twin *b = add(g, 10);
    a->tensor->used_on_look = b->tensor->state[0];
    b->tensor->used_on_look = a->tensor->param;
    for (int i = 0; i < 3; i++) {
        backward(a);
        backward(b);
        step(f);
        step(g);
    }
    teardown(g);
    teardown(f);
}
END_TEST

START_TEST(release_may_flush_every_plan) {
    fixture *f = setup(OF_FORWARD, 0);
    f->host->flushes_on_release = true;
    for (int i = 0; i < 5; i++)
        add(f, 10)->tensor->shared = i == 2;
    for (int i = 0; i < 3; i++) {
        backward_all(f);
        step(f);
    }
    teardown(f);
}
END_TEST

START_TEST(foreign_thread_ends_deferring) {
    fixture *f = setup(OF_FORWARD, 0);
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
    fixture *f = setup(OF_FORWARD, 0);
    twin *t = add(f, 10);
    of_plan_stop_deferring(f->plan);
    backward(t);
    step(f);
    ck_assert(launched(t));
    ck_assert(!counts(f).threads_seen);
    teardown(f);
}
END_TEST

START_TEST(unknown_memory_is_not_pending) {
    fixture *f = setup(OF_FORWARD, 0);
    twin *t = add(f, 10);
    backward(t);
    step(f);
    ck_assert(!of_touch(&f, false));
    ck_assert(!of_touch(NULL, false));
    ck_assert_uint_eq(counts(f).pending, 1);
    teardown(f);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("forward fusion");
    TCase *use = tcase_create("first use");
    tcase_set_timeout(use, 120);
    tcase_add_test(use, step_leaves_updates_pending_until_first_use);
    tcase_add_test(use, parameter_gradient_and_each_state_launch_the_update);
    tcase_add_test(use, two_hundred_steps_of_every_size_and_dtype_are_bit_equal);
    tcase_add_test(use, large_update_is_split_over_threads_with_equal_bits);
    tcase_add_test(use, unknown_memory_is_not_pending);
    tcase_add_test(use, memory_lives_as_long_as_its_update_is_pending);
    tcase_add_test(use, replaced_memory_keeps_its_own_update);
    tcase_add_test(use, foreign_thread_ends_deferring);
    tcase_add_test(use, host_can_end_deferring);
    suite_add_tcase(suite, use);
    TCase *stepping = tcase_create("step");
    tcase_add_test(stepping, life_of_an_update_in_order);
    tcase_add_test(stepping, step_again_launches_what_is_still_pending_first);
    tcase_add_test(stepping, step_again_with_the_same_gradient_applies_it_twice);
    tcase_add_test(stepping, parameter_without_gradient_is_left_alone);
    tcase_add_test(stepping, missing_state_is_reported_before_anything_changes);
    tcase_add_test(stepping, failed_step_changes_nothing);
    tcase_add_test(stepping, scalars_are_those_of_step_not_of_launch);
    tcase_add_test(stepping, parameters_of_one_group_may_be_at_different_steps);
    tcase_add_test(stepping, collect_may_use_pending_memory_of_any_plan);
    tcase_add_test(stepping, release_may_flush_every_plan);
    suite_add_tcase(suite, stepping);
    TCase *together = tcase_create("together");
    tcase_add_test(together, flush_launches_all_in_one_region);
    tcase_add_test(together, small_updates_need_no_threads);
    tcase_add_test(together, flush_all_reaches_every_plan);
    tcase_add_test(together, updates_at_once_share_one_region);
    tcase_add_test(together, shared_gradient_buffer_does_not_break_up_the_region);
    suite_add_tcase(suite, together);
    TCase *memory = tcase_create("whose memory");
    tcase_add_test(memory, shared_memory_is_updated_at_once);
    tcase_add_test(memory, what_must_go_alone_is_committed_launched_and_released_before_the_next);
    tcase_add_test(memory, eager_parameter_is_updated_at_once);
    tcase_add_test(memory, aliased_parameters_are_updated_in_order);
    tcase_add_test(memory, two_optimizers_on_one_parameter_are_updated_in_order);
    suite_add_tcase(suite, memory);
    return run(suite);
}
