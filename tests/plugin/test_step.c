/* SPDX-License-Identifier: BSD-3-Clause */
/* Forward fusion: what step() collects, refuses and takes a snapshot of. */
#include "fixture.h"

FORWARD(life_of_an_update_in_order) {
    twin *a = add(f, 10);
    add(f, 10)->tensor->shared = true;
    backward_all(f);
    fake_record(f->host);
    step(f);
    ck_assert_str_eq(fake_events(f->host), "collect:0 collect:1 commit:0 commit:1 defer:0 refuse:1 "
                                           "settle:1 release:1");
    fake_use(a->tensor->param, false);
    ck_assert_str_eq(fake_events(f->host), "settle:0 release:0");
}

FORWARD(step_again_launches_what_is_still_pending_first) {
    add(f, 100);
    for (int i = 0; i < 5; i++)
        train(f);
    ck_assert_uint_eq(counts(f).at_close, 4);
    ck_assert_uint_eq(counts(f).pending, 1);
}

FORWARD(step_again_with_the_same_gradient_applies_it_twice) {
    twin *t = pending(f, 100);
    step(f);
    check_twin(t);
    ck_assert_uint_eq(counts(f).created, 2);
}

/* Whether the last step() came with the inputs of the one before it. */
static bool came_again(fixture *f, twin *t) {
    const int before = t->tensor->again;
    backward(t);
    step(f);
    return t->tensor->again != before;
}

/* From the first step() that may on. */
static void comes_again_after_one_step(fixture *f, twin *t) {
    ck_assert(!came_again(f, t));
    ck_assert(came_again(f, t));
}

FORWARD(inputs_come_again_as_the_last_update_left_them) {
    twin *a = add(f, 10), *b = add(f, 10);
    comes_again_after_one_step(f, a);
    ck_assert(!came_again(f, b));
    ck_assert(came_again(f, a));
    ck_assert(came_again(f, b));
}

FORWARD(inputs_come_empty_where_collect_has_found_none) {
    twin *t = pending(f, 10);
    fake_set_grad(t->tensor, NULL);
    step(f);
    comes_again_after_one_step(f, t);
}

FORWARD(inputs_of_another_kind_do_not_come_again) {
    twin *t = pending(f, 10);
    t->tensor->exclusive = true;
    ck_assert(!came_again(f, t));
    ck_assert(!came_again(f, t));
    t->tensor->exclusive = false;
    comes_again_after_one_step(f, t);
}

BACKWARD(inputs_of_backward_do_not_come_again_in_step, OF_BUCKET_NONE) {
    twin *t = add(f, 10);
    for (int i = 0; i < 2; i++) {
        gradient(f, t);
        step(f);
    }
    ck_assert_int_eq(t->tensor->again, 1);
    comes_again_after_one_step(f, t);
}

static void set_amsgrad(fixture *f, double yes) {
    const of_rule *rule = of_plan_rule(f->plan);
    size_t i = 0;
    while (strcmp(rule->hyper[i], "amsgrad") != 0)
        i++;
    f->hyper[0][i] = yes;
    OK(of_plan_set_group(f->plan, 0, f->hyper[0], rule->n_hyper));
}

static void step_is_refused(fixture *f, twin *t, const char *words) {
    backward(t);
    INVALID(of_plan_step(f->plan, NULL, 0, NULL), words);
}

FORWARD(inputs_do_not_come_again_for_options_that_need_other_state) {
    twin *t = pending(f, 10);
    set_amsgrad(f, 1);
    step_is_refused(f, t, "the optimizer state 'max_exp_avg_sq' is missing");
    set_amsgrad(f, 0);
    comes_again_after_one_step(f, t);
}

WITH(inputs_that_come_again_are_checked, setup(OF_FORWARD, OF_BUCKET_NONE), teardown_unchecked) {
    twin *t = pending(f, 10);
    t->tensor->mixed = true;
    step_is_refused(f, t, "no kernel of 'adam'");
    t->tensor->mixed = false;
    ck_assert(!came_again(f, t));
    t->tensor->step = -1;
    step_is_refused(f, t, "bad inputs of an update: 10 elements, 4 keys, step 0 (first is 1)");
    ck_assert_int_eq(t->tensor->again, 1);
}

FORWARD(inputs_that_were_refused_do_not_come_again) {
    twin *t = add(f, 10);
    t->tensor->step = -1;
    step_is_refused(f, t, "step 0");
    t->tensor->step = 0;
    ck_assert(!came_again(f, t));
    check_twin(t);
}

FORWARD(parameter_without_gradient_is_left_alone) {
    twin *a = add(f, 10), *b = pending(f, 10);
    ck_assert(!of_access(a->tensor->param, false));
    check_twin(b);
}

FORWARD(missing_state_is_reported_before_anything_changes) {
    add_some(f, 4, 10);
    backward_all(f);
    f->twins[1].tensor->lacks_state = f->twins[3].tensor->lacks_state = true;
    size_t needs[1] = {99}, n_needs = 0;
    fake_record(f->host);
    ck_assert_int_eq(of_plan_step(f->plan, needs, 1, &n_needs), OF_NEEDS_STATE);
    ck_assert_uint_eq(n_needs, 2);
    ck_assert_uint_eq(needs[0], f->twins[1].slot);
    ck_assert_str_eq(fake_events(f->host),
                     "collect:0 collect:1 collect:2 collect:3 release:0 release:2");
    ck_assert(!of_any_pending());
    f->twins[1].tensor->lacks_state = f->twins[3].tensor->lacks_state = false;
    step(f);
}

FORWARD(failed_step_changes_nothing) {
    add_some(f, 3, 10);
    backward_all(f);
    f->twins[0].tensor->lacks_state = f->twins[2].tensor->broken = true;
    INVALID(of_plan_step(f->plan, NULL, 0, NULL), "tensor 2 is broken");
    ck_assert(!of_any_pending());
    ck_assert_int_eq(atomic_load(&f->host->holds), 0);
    ck_assert_uint_eq(counts(f).created, 0);
    f->twins[0].tensor->lacks_state = f->twins[2].tensor->broken = false;
    step(f);
}

FORWARD(scalars_are_those_of_step_not_of_launch) {
    twin *a = add(f, 100), *b = add_to_group(f, 100, 1);
    train(f);
    set_lr(f, 0, 0.5);
    set_lr(f, 1, 0.25);
    check_twin(a);
    check_twin(b);
    train(f);
    ck_assert_double_eq(of_plan_hyper(f->plan, a->slot)[0], 0.5);
    ck_assert_double_eq(of_plan_hyper(f->plan, b->slot)[0], 0.25);
}

FORWARD(parameters_of_one_group_may_be_at_different_steps) {
    add_some(f, 6, 20);
    for (size_t round = 1; round < 6; round++) {
        for (size_t i = 0; i < f->n; i += round)
            backward(&f->twins[i]);
        step(f);
        for (size_t i = 0; i < f->n; i++)
            fake_set_grad(f->twins[i].tensor, NULL);
    }
}

FORWARD(collect_may_use_pending_memory_of_any_plan) {
    fixture *g = setup_beside(f, OF_FORWARD);
    twin *a = add(f, 10), *b = add(g, 10);
    a->tensor->used_on_look = b->tensor->state[0];
    b->tensor->used_on_look = a->tensor->param;
    for (int i = 0; i < 3; i++) {
        backward_all(f);
        backward_all(g);
        step(f);
        step(g);
    }
    teardown(g);
}

TESTS(host_may_keep_its_references_in_the_update, 2) {
    const of_mode mode = row ? OF_BACKWARD : OF_FORWARD;
    fixture *f = setup(mode, 0);
    f->host->holds_inside = true;
    for (int i = 0; i < 7; i++)
        add(f, 10)->tensor->shared = i == 2;
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < f->n && mode == OF_BACKWARD; i++)
            gradient(f, &f->twins[i]);
        if (mode == OF_FORWARD)
            train(f);
        else
            step_only(f);
        check_twin(&f->twins[round]);
    }
    f->twins[3].tensor->lacks_state = true;
    backward_all(f);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_NEEDS_STATE);
    teardown(f);
}

FORWARD(release_may_flush_every_plan) {
    f->host->flushes_on_release = true;
    for (int i = 0; i < 5; i++)
        add(f, 10)->tensor->shared = i == 2;
    for (int i = 0; i < 3; i++)
        train(f);
}
