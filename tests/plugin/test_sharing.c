/* SPDX-License-Identifier: BSD-3-Clause */
/* Forward fusion: which updates share a launch, and which share memory. */
#include <string.h>

#include "fixture.h"

START_TEST(flush_launches_all_in_one_region) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
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
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
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
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
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

START_TEST(updates_at_once_share_one_region) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
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
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
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

/* Updates enter the registry together, up to one whose gradient an earlier one has: in any order of
 * what can wait, what can't and what meets another, each parameter is updated once, in order. */
START_TEST(updates_that_meet_are_entered_one_after_the_other) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    for (int i = 0; i < 12; i++)
        add(f, 10);
    backward_all(f);
    for (size_t i = 0; i < f->n; i++) {
        fake_tensor *tensor = f->twins[i].tensor;
        tensor->shared = i % 4 == 1;
        if (i % 3 != 2 || i < 3)
            continue;
        fake_buffer_retain(f->twins[i - 2].tensor->grad);
        fake_set_grad(tensor, f->twins[i - 2].tensor->grad);
    }
    step(f);
    ck_assert_uint_eq(counts(f).at_once, 3);
    ck_assert_uint_eq(counts(f).created, 12);
    for (size_t i = 0; i < f->n; i++)
        check_twin(&f->twins[i]);
    teardown(f);
}
END_TEST

/* Each step's gradients have other memory: what is left of them must neither hide what is pending
 * nor be found. */
START_TEST(keys_of_gradients_that_are_gone_make_room) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    enum { KEPT = 3000 };
    static fake_buffer *gone[KEPT];
    twin *t = add(f, 10);
    twin *other = add(f, 10);
    for (int i = 0; i < KEPT; i++) {
        backward_all(f);
        gone[i] = t->tensor->grad;
        fake_buffer_retain(gone[i]);
        t->tensor->shared = true; /* it is held here */
        other->tensor->shared = i % 2;
        step(f);
        ck_assert(launched(t));
        ck_assert_int_eq(of_is_pending(other->tensor->grad), !other->tensor->shared);
        ck_assert(i == 0 || !of_is_pending(gone[i - 1]));
    }
    for (int i = 0; i < KEPT; i++)
        fake_buffer_release(gone[i]);
    teardown(f);
}
END_TEST

START_TEST(shared_memory_is_updated_at_once) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
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
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    for (int i = 0; i < 4; i++)
        add(f, 10)->tensor->exclusive = i > 1;
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
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *eager = add_eager(f, 10);
    twin *lazy = add(f, 10);
    backward_all(f);
    step(f);
    ck_assert(launched(eager) && !launched(lazy));
    teardown(f);
}
END_TEST

/* The same parameter twice in one optimizer: stock updates it twice, in order. */
static void alias_in_one_plan(bool shared, bool eager) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
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
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
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

int main(void) {
    Suite *suite = suite_create("sharing");
    TCase *together = tcase_create("together");
    tcase_add_test(together, flush_launches_all_in_one_region);
    tcase_add_test(together, small_updates_need_no_threads);
    tcase_add_test(together, flush_all_reaches_every_plan);
    tcase_add_test(together, updates_at_once_share_one_region);
    tcase_add_test(together, shared_gradient_buffer_does_not_break_up_the_region);
    suite_add_tcase(suite, together);
    TCase *memory = tcase_create("whose memory");
    tcase_add_test(memory, updates_that_meet_are_entered_one_after_the_other);
    tcase_add_test(memory, keys_of_gradients_that_are_gone_make_room);
    tcase_add_test(memory, shared_memory_is_updated_at_once);
    tcase_add_test(memory, what_must_go_alone_is_committed_launched_and_released_before_the_next);
    tcase_add_test(memory, eager_parameter_is_updated_at_once);
    tcase_add_test(memory, aliased_parameters_are_updated_in_order);
    tcase_add_test(memory, two_optimizers_on_one_parameter_are_updated_in_order);
    suite_add_tcase(suite, memory);
    return run(suite);
}
