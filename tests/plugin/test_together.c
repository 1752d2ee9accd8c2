/* SPDX-License-Identifier: BSD-3-Clause */
/* Small updates on the CPU that run together: gradients that backward fusion has let
 * wait for each other, and neighbours of what is used in forward fusion. */
#include "fixture.h"

enum { BUCKET = 4000 /* bytes: 1000 float32 elements */, SMALL = OF_SERIAL_ELEMENTS - 1 };

static const size_t all[] = {0, 1, 2};

/* The gradients of one pass, complete in this order, and its end. *at: where it failed. */
static of_status gradients(fixture *f, const size_t *slots, size_t n, size_t *at) {
    of_pass *pass = begin_pass(f);
    of_status status = OF_OK;
    *at = OF_NO_SLOT;
    for (size_t i = 0; i < n && status == OF_OK; i++)
        status = of_pass_ready(pass, slots[i], at);
    if (status == OF_OK)
        status = of_pass_end(pass, at);
    of_pass_release(pass);
    return status;
}

static void train_in_one_pass(fixture *f, const size_t *slots, size_t n) {
    size_t at;
    for (size_t i = 0; i < n; i++) {
        backward(&f->twins[slots[i]]);
        expect_update(f, &f->twins[slots[i]]);
    }
    OK(gradients(f, slots, n, &at));
}

static fixture *three(void) {
    fixture *f = setup(OF_BACKWARD, 0);
    add_some(f, 3, 10);
    return f;
}

#define THREE(name) WITH(name, three(), teardown)

BACKWARD(gradients_that_waited_run_in_one_launch, 0) {
    static const size_t slots[] = {2, 0, 3};
    for (int i = 0; i < 4; i++)
        add(f, 700 * i);
    for (int step = 0; step < 3; step++) {
        train_in_one_pass(f, slots, 3);
        for (size_t i = 0; i < 3; i++)
            ck_assert(launched(&f->twins[slots[i]]) && of_plan_is_updated(f->plan, slots[i]));
        ck_assert(!of_plan_is_updated(f->plan, 1));
        step_only(f);
    }
    ck_assert_uint_eq(counts(f).created, 9);
    ck_assert_uint_eq(counts(f).at_close, 9);
    ck_assert_uint_eq(counts(f).launches, 3);
}

THREE(those_that_lack_state_get_it) {
    size_t at = 0;
    of_pass *pass = NULL;
    bool first;
    f->twins[0].tensor->lacks_state = f->twins[2].tensor->lacks_state = true;
    backward_all(f);
    f->host->refuses = true;
    ck_assert_int_eq(of_pass_begin(f->plan, 99999, &pass, &first), OF_REFUSED);
    f->host->refuses = false;
    OK(of_pass_begin(f->plan, 99999, &pass, &first));
    f->host->refuses = true;
    for (size_t i = 0; i < 3; i++)
        OK(of_pass_ready(pass, i, &at));
    FAILS(OF_REFUSED, of_pass_end(pass, &at), "no state for slot 0");
    ck_assert(at == OF_NO_SLOT && !of_plan_unconfirmed(f->plan) && launched(&f->twins[1]));
    of_pass_release(pass);
    f->host->refuses = false;
    for (size_t i = 0; i < 3; i++)
        expect_update(f, &f->twins[i]);
    OK(gradients(f, all, 3, &at));
    ck_assert_int_eq(atomic_load(&f->host->made), 2);
}

THREE(a_failure_changes_nothing_and_says_where) {
    size_t at = 0;
    backward_all(f);
    f->twins[1].tensor->broken = true;
    INVALID(gradients(f, all, 3, &at), "tensor 1 is broken");
    ck_assert_uint_eq(at, 1);
    f->twins[1].tensor->broken = false;
    ck_assert(!of_plan_unconfirmed(f->plan) && counts(f).created == 0);
}

THREE(a_second_gradient_is_refused_and_changes_nothing) {
    static const size_t again[] = {2, 1};
    size_t at = 0;
    train_in_one_pass(f, all, 2);
    backward(&f->twins[1]);
    backward(&f->twins[2]);
    ck_assert_int_eq(gradients(f, again, 2, &at), OF_TWICE);
    ck_assert(at == 1 && !of_plan_is_updated(f->plan, 2));
    ck_assert(of_plan_is_updated(f->plan, 1) && counts(f).created == 2);
}

THREE(what_is_exclusive_runs_by_itself) {
    f->twins[1].tensor->exclusive = true;
    train_in_one_pass(f, all, 3);
    ck_assert(of_plan_is_updated(f->plan, 1) && launched(&f->twins[1]));
    ck_assert_uint_eq(counts(f).at_close, 2);
    ck_assert_uint_eq(counts(f).at_once, 1);
}

BACKWARD(the_host_is_told_whose_inputs_come_next, 0) {
    enum { N = 40, CHOSEN = 34 };
    size_t slots[CHOSEN];
    add_some(f, N, 10);
    for (size_t i = 0; i < CHOSEN; i++)
        slots[i] = CHOSEN - i;
    train_in_one_pass(f, slots, CHOSEN);
    for (size_t i = 0; i < N; i++)
        ck_assert_int_eq(f->twins[i].tensor->prefetched, i >= 1 && i <= CHOSEN);
    step_only(f);
    for (size_t i = 0; i < N; i++) /* 0 is alone among those that come with it */
        ck_assert_int_eq(f->twins[i].tensor->prefetched, i >= 1);
}

/* A step, a use of one of its parameters, and which of them have been launched. */
TESTS(neighbours_run_at_the_first_use_of_one_of_them, 5) {
    static const struct {
        const char *what;
        size_t bucket_bytes, n;
        int64_t numel[6];
        int threads;
        size_t used;
        const char *launched; /* 'x', by parameter */
    } rows[] = {
        {"up to a bucket", BUCKET, 6, {300, 300, 300, 300, 300, 300}, 3, 1, "-xxxx-"},
        {"on one thread up to 64 KiB", 1 << 20, 4, {10000, 10000, 10000, 10000}, 1, 1, "-xx-"},
        {"on one thread none, where the user says so", 1, 2, {100, 100}, 1, 0, "x-"},
        {"not past what is large", 1 << 20, 3, {SMALL, SMALL + 1, 10}, 3, 0, "x--"},
        {"none with what is large", 1 << 20, 3, {SMALL, SMALL + 1, 10}, 3, 1, "-x-"},
    };
    fixture *f = setup(OF_FORWARD, rows[row].bucket_bytes);
    f->host->n_threads = rows[row].threads;
    for (size_t i = 0; i < rows[row].n; i++)
        add(f, rows[row].numel[i]);
    train(f);
    fake_use(f->twins[rows[row].used].tensor->param, false);
    unsigned n = 0;
    for (size_t i = 0; i < rows[row].n; i++) {
        n += launched(&f->twins[i]);
        ck_assert_msg(launched(&f->twins[i]) == (rows[row].launched[i] == 'x'), "%s: parameter %zu",
                      rows[row].what, i);
    }
    ck_assert_uint_eq(counts(f).at_use, n);
    ck_assert_uint_eq(counts(f).launches, 1);
    teardown(f);
}
