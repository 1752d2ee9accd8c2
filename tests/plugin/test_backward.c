/* SPDX-License-Identifier: BSD-3-Clause */
/* Backward fusion, on the CPU and on a device: small gradients wait and are updated together, and
 * step() confirms. */
#include "fake_device.h"

enum { BUCKET = 4000 }; /* bytes: 1000 float32 elements */

/* A test for both places. */
#define BACKWARD_BOTH(name)                                                                        \
    static void name##_on(fixture *f);                                                             \
    TESTS(name, 2) {                                                                               \
        fixture *f = row ? setup_on_device(OF_BACKWARD, BUCKET) : setup(OF_BACKWARD, BUCKET);      \
        name##_on(f);                                                                              \
        (row ? teardown_on_device : teardown)(f);                                                  \
    }                                                                                              \
    static void name##_on(fixture *f)

static twin *add_there(fixture *f, int64_t numel) {
    return f->host->table.gpu ? add_on_device(f, numel, 0) : add(f, numel);
}

static void whole_pass(fixture *f, twin *t) {
    gradient(f, t);
    OK(end_pass(f));
}

/* Buckets */

BACKWARD_BOTH(bucket_is_launched_when_it_is_full_in_one_go) {
    for (int i = 0; i < 4; i++)
        add_there(f, 300);
    for (size_t i = 0; i < 3; i++) {
        gradient(f, &f->twins[i]);
        ck_assert(counts(f).created == 0 && !of_any_pending());
        ck_assert_ptr_nonnull(f->twins[i].tensor->grad);
    }
    gradient(f, &f->twins[3]);
    for (size_t i = 0; i < 4; i++)
        ck_assert(launched(&f->twins[i]));
    of_counts c = counts(f);
    ck_assert_uint_eq(c.pending, 0);
    ck_assert_uint_eq(c.created, 4);
    ck_assert_uint_eq(c.launches, 1);
    ck_assert_uint_eq(c.at_close, 4);
    step(f);
}

BACKWARD_BOTH(bucket_is_full_at_its_limit_exactly) {
    twin *a = add_there(f, 999), *b = add_there(f, 1);
    gradient(f, a);
    ck_assert(!launched(a));
    gradient(f, b);
    ck_assert(launched(a) && launched(b));
}

BACKWARD_BOTH(no_update_is_deferred) {
    twin *a = add_there(f, 600), *b = add_there(f, 600);
    f->host->n_threads = 1;
    fake_record(f->host);
    gradient(f, a);
    gradient(f, b);
    ck_assert_str_eq(fake_events(f->host), "collect:0 collect:1 commit:0 commit:1 settle:0 "
                                           "settle:1 release:0 release:1");
}

BACKWARD_BOTH(large_update_takes_along_what_waits) {
    twin *small = add_there(f, 10), *large = add_there(f, 1000);
    gradient(f, small);
    ck_assert_uint_eq(counts(f).created, 0);
    gradient(f, large);
    ck_assert(launched(large) && launched(small));
    ck_assert_uint_eq(counts(f).launches, 1);
}

BACKWARD(update_of_many_elements_takes_along_what_waits, 0) {
    twin *small = add(f, OF_SERIAL_ELEMENTS - 1), *large = add(f, OF_SERIAL_ELEMENTS);
    gradient(f, small);
    ck_assert_uint_eq(counts(f).created, 0);
    gradient(f, large);
    ck_assert(launched(small) && launched(large));
}

BACKWARD(without_buckets_every_update_goes_alone, OF_BUCKET_NONE) {
    for (int i = 0; i < 3; i++) {
        twin *t = add(f, i * 5);
        gradient(f, t);
        ck_assert(launched(t));
    }
    ck_assert_uint_eq(counts(f).launches, 3);
}

BACKWARD_BOTH(use_of_a_parameter_whose_gradient_waits_launches_nothing) {
    twin *a = add_there(f, 400), *b = add_there(f, 600);
    gradient(f, a);
    fake_use(a->tensor->param, false);
    ck_assert(!launched(a));
    gradient(f, b);
    ck_assert(launched(a) && launched(b));
}

BACKWARD_BOTH(end_launches_what_waits) {
    twin *t = add_there(f, 10);
    gradient(f, t);
    ck_assert_uint_eq(counts(f).pending, 0);
    ck_assert(!of_any_pending() && !launched(t));
    OK(end_pass(f));
    ck_assert(launched(t));
}

BACKWARD_BOTH(aliased_parameters_share_no_bucket) {
    twin *a = add_there(f, 100), *b = add_tensor(f, fake_tensor_alias(a->tensor), 0, false);
    b->tensor->device = a->tensor->device;
    for (int i = 0; i < 3; i++) {
        void *state[] = {b->state[0], b->state[1]};
        gradient(f, a);
        backward(b);
        expect_update_at(b, a->param, state);
        OK(ready(f, b->slot));
        OK(end_pass(f));
        step_only(f);
    }
    memcpy(b->param, a->param, a->tensor->param->bytes);
}

/* step() */

BACKWARD_BOTH(step_confirms) {
    twin *t = add_there(f, 10);
    gradient(f, t);
    ck_assert(!of_plan_unconfirmed(f->plan));
    OK(end_pass(f));
    ck_assert(of_plan_unconfirmed(f->plan));
    step_only(f);
    ck_assert(launched(t) && !of_plan_unconfirmed(f->plan));
    ck_assert_uint_eq(counts(f).created, 1);
    for (int i = 0; i < 50; i++) {
        whole_pass(f, t);
        step_only(f);
        check_twin(t);
    }
}

BACKWARD(step_updates_gradients_set_by_hand, BUCKET) {
    twin *hooked = add(f, 10), *by_hand = add(f, 10);
    gradient(f, hooked);
    backward(by_hand);
    expect_update(f, by_hand);
    step_only(f);
    ck_assert(launched(hooked) && launched(by_hand) && !of_any_pending());
    ck_assert_ptr_null(by_hand->tensor->grad);
}

BACKWARD_BOTH(second_gradient_before_step_is_refused_and_changes_nothing) {
    twin *t = add_there(f, 10);
    whole_pass(f, t);
    backward(t);
    FAILS(OF_TWICE, ready(f, t->slot), "step()");
    ck_assert_ptr_nonnull(strstr(of_error_message(), "mode=\"forward\""));
    ck_assert_uint_eq(counts(f).created, 1);
    fake_record(f->host);
    step_only(f);
    ck_assert_str_eq(fake_events(f->host), ""); /* step() leaves alone what backward() updated */
    gradient(f, t);
}

BACKWARD_BOTH(hyper_parameters_are_those_of_the_moment_of_the_gradient) {
    twin *before = add_there(f, 10), *after = add_there(f, 10);
    whole_pass(f, before);
    set_lr(f, 0, 0.5);
    whole_pass(f, after);
    step_only(f);
}

BACKWARD_BOTH(host_that_starts_over_can_say_what_was_updated) {
    twin *a = add_there(f, 10), *b = add_there(f, 10);
    ck_assert(!of_plan_is_updated(f->plan, a->slot));
    of_plan_set_updated(f->plan, a->slot);
    of_plan_set_updated(f->plan, a->slot); /* counts once */
    of_plan_set_updated(f->plan, 99);      /* no such slot */
    ck_assert(of_plan_is_updated(f->plan, a->slot) && of_plan_unconfirmed(f->plan));
    ck_assert(!of_plan_is_updated(f->plan, b->slot) && !of_plan_is_updated(f->plan, 99));
    backward(a);
    ck_assert_int_eq(ready(f, a->slot), OF_TWICE);
    backward(b);
    expect_update(f, b);
    step_only(f);
    ck_assert(!of_plan_unconfirmed(f->plan) && !of_plan_is_updated(f->plan, a->slot));
}

BACKWARD_BOTH(failed_step_keeps_what_backward_updated) {
    twin *a = add_there(f, 10), *b = add_there(f, 10);
    whole_pass(f, a);
    backward(b);
    b->tensor->broken = true;
    INVALID(of_plan_step(f->plan, NULL, 0, NULL), "is broken");
    ck_assert(of_plan_unconfirmed(f->plan));
    b->tensor->broken = false;
    expect_update(f, b);
    step_only(f);
    ck_assert(!of_plan_unconfirmed(f->plan));
}

/* Refusals */

BACKWARD_BOTH(missing_state_is_made_and_errors_are_reported_and_change_nothing) {
    twin *t = add_there(f, 1000);
    t->tensor->lacks_state = true;
    backward(t);
    size_t at = 0;
    of_pass *pass = f->pass = begin_pass(f);
    f->host->refuses = true;
    FAILS(OF_REFUSED, of_pass_ready(pass, t->slot, &at), "no state for slot 0");
    ck_assert_uint_eq(at, OF_NO_SLOT);
    f->host->refuses = false;
    t->tensor->broken = true;
    INVALID(of_pass_ready(pass, t->slot, &at), "tensor 0 is broken");
    ck_assert_uint_eq(at, t->slot);
    ck_assert(!of_plan_unconfirmed(f->plan));
    t->tensor->broken = false;
    gradient(f, t);
    ck_assert_int_eq(atomic_load(&f->host->made), 1);
}

BACKWARD_BOTH(hook_without_gradient_is_nothing) {
    twin *t = add_there(f, 10);
    OK(ready(f, t->slot));
    ck_assert(!of_plan_unconfirmed(f->plan));
}

FORWARD(passes_need_backward_mode) {
    of_pass *pass = (of_pass *)&f;
    bool first = true;
    add(f, 10);
    INVALID(of_pass_begin(f->plan, 1, &pass, &first), "backward");
    ck_assert(!pass && !first);
}

BACKWARD(passes_need_a_token_and_gradients_a_slot, 0) {
    of_pass *pass = NULL;
    bool first;
    size_t at = 0;
    add(f, 10);
    INVALID(of_pass_begin(f->plan, OF_NO_TOKEN, &pass, &first), "outside of every backward pass");
    f->pass = begin_pass(f);
    INVALID(of_pass_ready(f->pass, 1, &at), "there is no slot 1: the plan has 1");
}
