/* SPDX-License-Identifier: BSD-3-Clause */
/* Forward fusion: which updates share a launch, and which share memory. */
#include "fixture.h"

static void check_launches(const fixture *f, unsigned launches, int regions) {
    ck_assert_uint_eq(counts(f).launches, launches);
    ck_assert_int_eq(atomic_load(&f->host->regions), regions);
}

FORWARD(flush_launches_all_in_one_region) {
    for (int i = 0; i < 20; i++)
        add(f, 1000 + i);
    train(f);
    of_plan_flush(f->plan);
    for (size_t i = 0; i < f->n; i++)
        ck_assert(launched(&f->twins[i]));
    ck_assert_uint_eq(counts(f).at_close, 20);
    check_launches(f, 1, 1);
    ck_assert(!of_any_pending());
}

FORWARD(small_updates_need_no_threads) {
    add_some(f, 10, 50);
    train(f);
    of_plan_flush(f->plan);
    check_launches(f, 1, 0);
}

FORWARD(flush_all_reaches_every_plan) {
    fixture *g = setup_beside(f, OF_FORWARD);
    twin *a = pending(f, 10), *b = pending(g, 10);
    of_flush_all();
    ck_assert(launched(a) && launched(b) && !of_any_pending());
    teardown(g);
}

FORWARD(updates_at_once_share_one_region) {
    for (int i = 0; i < 10; i++)
        add_eager(f, i % 2 ? 100 : 20000);
    train(f);
    check_launches(f, 1, 1);
}

static void share_gradient(twin *to, const twin *from) {
    fake_buffer_retain(from->tensor->grad);
    fake_set_grad(to->tensor, from->tensor->grad);
}

FORWARD(shared_gradient_buffer_does_not_break_up_the_region) {
    twin *a = add(f, 100), *b = add(f, 100);
    a->tensor->shared = b->tensor->shared = true;
    backward(a);
    share_gradient(b, a);
    step(f);
    ck_assert_uint_eq(counts(f).launches, 1);
}

/* Updates enter the registry together, up to one whose gradient an earlier one has: in any order of
 * what can wait, what can't and what meets another, each parameter is updated once, in order. */
FORWARD(updates_that_meet_are_entered_one_after_the_other) {
    add_some(f, 12, 10);
    backward_all(f);
    for (size_t i = 0; i < f->n; i++) {
        f->twins[i].tensor->shared = i % 4 == 1;
        if (i % 3 == 2 && i > 2)
            share_gradient(&f->twins[i], &f->twins[i - 2]);
    }
    step(f);
    ck_assert_uint_eq(counts(f).at_once, 3);
    ck_assert_uint_eq(counts(f).created, 12);
}

/* Each step's gradients have other memory: what is left of them must neither hide what is pending
 * nor be found. */
FORWARD(keys_of_gradients_that_are_gone_make_room) {
    enum { KEPT = 3000 };
    static fake_buffer *gone[KEPT];
    twin *t = add(f, 10), *other = add(f, 10);
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
}

FORWARD(shared_memory_and_eager_parameters_are_updated_at_once) {
    twin *shared = add(f, 10), *eager = add_eager(f, 10), *lazy = add(f, 10);
    shared->tensor->shared = true;
    train(f);
    ck_assert(launched(shared) && launched(eager) && !launched(lazy));
    ck_assert(!of_is_pending(shared->tensor->param) && !of_is_pending(eager->tensor->param));
    ck_assert_uint_eq(counts(f).at_once, 2);
}

FORWARD(what_must_go_alone_is_committed_launched_and_released_before_the_next) {
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
}

/* The parameter of a, with other state, updated after it: stock updates it twice, in order. */
static void alias_is_updated_in_order(fixture *f, twin *a, fixture *g, twin *b) {
    void *state[] = {b->state[0], b->state[1]};
    for (int i = 0; i < 3; i++) {
        backward(a);
        backward(b);
        expect_update(f, a);
        expect_update_at(b, a->param, state);
        step_only(f);
        if (g != f) {
            step_only(g);
            ck_assert(counts(f).pending == 0 && counts(g).pending == 1);
        }
    }
    memcpy(b->param, a->param, a->tensor->param->bytes);
    check_twin(b);
}

TESTS(aliased_parameters_are_updated_in_order, 4) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    twin *a = add(f, 30000);
    fake_tensor *alias = fake_tensor_alias(a->tensor);
    a->tensor->shared = alias->shared = row & 1;
    alias_is_updated_in_order(f, a, f, add_tensor(f, alias, 0, row & 2));
    teardown(f);
}

FORWARD(two_optimizers_on_one_parameter_are_updated_in_order) {
    fixture *g = setup_beside(f, OF_FORWARD);
    twin *a = add(f, 1000);
    alias_is_updated_in_order(f, a, g, add_tensor(g, fake_tensor_alias(a->tensor), 1, false));
    teardown(g);
}
