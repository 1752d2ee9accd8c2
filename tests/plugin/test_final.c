/* SPDX-License-Identifier: BSD-3-Clause */
/* Final mode, and step() of one slot: whose update waits, and until when. */
#include "fixture.h"

enum { BUCKET = 4000 }; /* bytes: 1000 float32 elements */

#define FINAL(name) WITH(name, setup(OF_FINAL, BUCKET), teardown)

static of_pass *begin(const fixture *f, bool only_adds) {
    of_pass *pass = NULL;
    bool first = false;
    OK(of_pass_begin(f->plan, 1, &pass, &first));
    ck_assert(first);
    ck_assert_int_eq(of_pass_only_adds(pass), only_adds);
    return pass;
}

static void end(of_pass *pass) {
    size_t at = 0;
    OK(of_pass_end(pass, &at));
    of_pass_release(pass);
}

static void complete(fixture *f, twin *t, bool at_once) {
    backward(t);
    expect_update(f, t);
    OK(of_plan_step_slot(f->plan, t->slot, at_once));
}

FINAL(small_updates_wait_for_a_bucket_large_ones_do_not) {
    twin *a = add(f, 500), *b = add(f, 1000), *c = add(f, 500);
    of_pass *pass = begin(f, false);
    complete(f, a, false);
    complete(f, b, false);
    ck_assert(!launched(a) && launched(b));
    ck_assert_uint_eq(counts(f).pending, 1);
    complete(f, c, false);
    ck_assert(launched(a) && launched(c));
    end(pass);
}

FINAL(the_end_of_a_pass_launches_what_waits) {
    twin *a = add(f, 10), *b = add(f, 10);
    of_pass *pass = begin(f, false);
    complete(f, a, false);
    complete(f, b, true);
    ck_assert(!launched(a) && launched(b));
    end(pass);
    ck_assert(launched(a));
}

FINAL(a_look_launches_what_waits) {
    twin *a = add(f, 10);
    complete(f, a, false);
    check_twin(a);
    ck_assert_uint_eq(counts(f).at_use, 1);
}

FINAL(a_second_gradient_is_a_second_update) {
    twin *a = add(f, 10);
    of_pass *pass = begin(f, false);
    complete(f, a, false);
    complete(f, a, false);
    end(pass);
    ck_assert_uint_eq(counts(f).created, 2);
}

FINAL(an_exclusive_one_does_not_wait) {
    twin *a = add(f, 10);
    a->tensor->exclusive = true;
    complete(f, a, false);
    ck_assert(launched(a));
}

FINAL(state_is_asked_for_and_nothing_is_done) {
    twin *a = add(f, 10);
    backward(a);
    a->tensor->lacks_state = true;
    ck_assert_int_eq(of_plan_step_slot(f->plan, a->slot, false), OF_NEEDS_STATE);
    ck_assert_uint_eq(counts(f).created, 0);
    a->tensor->lacks_state = false;
    complete(f, a, false);
}

FINAL(an_error_is_told_and_nothing_is_done) {
    twin *a = add(f, 10);
    backward(a);
    a->tensor->broken = true;
    INVALID(of_plan_step_slot(f->plan, a->slot, false), "is broken");
    INVALID(of_plan_step_slot(f->plan, 7, false), "slot");
    a->tensor->broken = false;
    ck_assert_uint_eq(counts(f).created, 0);
}

/* No step() says that the next pass is the first again. */
TEST(passes_are_counted_without_step) {
    fixture *f = setup(OF_FINAL, BUCKET);
    of_plan_add_only(f->plan, +1);
    end(begin(f, true));
    of_plan_add_only(f->plan, -1);
    end(begin(f, false));
    end(begin(f, false));
    teardown(f);
}

BACKWARD(step_of_a_slot_confirms_its_update, BUCKET) {
    twin *a = add(f, 1000), *b = add(f, 1000);
    gradient(f, a);
    gradient(f, b);
    OK(of_plan_step_slot(f->plan, a->slot, true));
    ck_assert(!of_plan_is_updated(f->plan, a->slot) && of_plan_is_updated(f->plan, b->slot));
    ck_assert_uint_eq(counts(f).created, 2);
    step_only(f);
}

FORWARD(step_of_a_slot_leaves_others_alone) {
    twin *a = pending(f, 10), *b = add(f, 10);
    complete(f, b, true);
    ck_assert(!launched(a) && launched(b));
}
