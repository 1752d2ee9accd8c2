/* SPDX-License-Identifier: BSD-3-Clause */
/* Backward passes: tokens, what waits in which, threads, late completions, and passes that
 * only add. */
#include <stdlib.h>

#include "fake_device.h"

enum { BUCKET = 4000 }; /* bytes: 1000 float32 elements */

static of_pass *begin(const fixture *f, of_token token, bool first_one) {
    of_pass *pass = NULL;
    bool first = !first_one;
    OK(of_pass_begin(f->plan, token, &pass, &first));
    ck_assert_int_eq(first, first_one);
    return pass;
}

static void complete(fixture *f, of_pass *pass, twin *t) {
    size_t at = 0;
    backward(t);
    expect_update(f, t);
    OK(of_pass_ready(pass, t->slot, &at));
}

static void end(of_pass *pass) {
    size_t at = 0;
    OK(of_pass_end(pass, &at));
    of_pass_release(pass);
}

BACKWARD(a_token_is_one_pass_until_it_ends, BUCKET) {
    twin *a = add(f, 10), *b = add(f, 10);
    of_pass *pass = begin(f, UINT64_MAX, true);
    of_pass *again = begin(f, UINT64_MAX, false);
    ck_assert_ptr_eq(pass, again);
    ck_assert_int_eq(atomic_load(&f->host->begun), 1);
    complete(f, pass, a);
    complete(f, again, b);
    of_pass_release(again);
    end(pass);
    ck_assert(launched(a) && launched(b));
    step_only(f);
    pass = begin(f, UINT64_MAX, true); /* a token may be used again */
    complete(f, pass, a);
    end(pass);
    step_only(f);
    ck_assert_int_eq(atomic_load(&f->host->begun), 2);
}

BACKWARD(what_waits_can_be_run_before_the_end, BUCKET) {
    size_t at = 0;
    twin *a = add(f, 10), *b = add(f, 10);
    of_pass *pass = begin(f, 1, true);
    of_pass *other = begin(f, 2, true);
    complete(f, other, b);
    complete(f, pass, a);
    ck_assert_uint_eq(counts(f).created, 0);
    OK(of_pass_run(pass, &at));
    ck_assert(launched(a) && !of_plan_is_updated(f->plan, b->slot));
    twin *c = add(f, 10); /* the pass goes on */
    complete(f, pass, c);
    ck_assert(!of_plan_is_updated(f->plan, c->slot));
    end(pass);
    end(other);
    ck_assert(launched(b) && launched(c));
    step_only(f);
}

BACKWARD(two_passes_each_take_their_own, BUCKET) {
    twin *a = add(f, 10), *b = add(f, 10);
    of_pass *first = begin(f, 1, true);
    of_pass *second = begin(f, 2, true);
    complete(f, first, a);
    complete(f, second, b);
    end(second);
    ck_assert(launched(b) && !of_plan_is_updated(f->plan, a->slot));
    end(first);
    ck_assert(launched(a));
    step_only(f);
}

/* The gradient has both by then, and step() applies the sum. */
BACKWARD(what_two_passes_add_to_is_left_to_step, BUCKET) {
    twin *t = add(f, 10);
    size_t at = 0;
    of_pass *first = begin(f, 1, true);
    of_pass *second = begin(f, 2, true);
    backward(t);
    expect_update(f, t);
    OK(of_pass_ready(first, t->slot, &at));
    OK(of_pass_ready(second, t->slot, &at));
    end(first);
    end(second);
    ck_assert(!of_plan_unconfirmed(f->plan) && counts(f).created == 0);
    ck_assert_uint_eq(counts(f).in_step, 0);
    step_only(f);
    ck_assert(launched(t));
    ck_assert_uint_eq(counts(f).in_step, 1);
}

TESTS(an_abandoned_pass_leaves_its_gradients_to_step, 2) {
    fixture *f = setup(OF_BACKWARD, BUCKET);
    twin *a = add(f, 10), *b = add(f, 2000);
    of_pass *pass = begin(f, 1, true);
    complete(f, pass, a);
    if (row) { /* without a word */
        of_pass_release(pass);
    } else {
        of_pass_abandon(pass);
        complete(f, pass, b);
        end(pass);
    }
    ck_assert(!of_plan_unconfirmed(f->plan) && counts(f).created == 0);
    step_only(f);
    ck_assert(launched(a) && launched(b));
    teardown(f);
}

TESTS(what_is_ready_after_the_end_is_updated_at_once, 2) {
    fixture *f = row ? setup_on_device(OF_BACKWARD, BUCKET) : setup(OF_BACKWARD, BUCKET);
    twin *a = row ? add_on_device(f, 10, 0) : add(f, 10);
    twin *b = row ? add_on_device(f, 10, 0) : add(f, 10);
    of_pass *pass = begin(f, 1, true);
    size_t at = 0;
    of_pass_retain(pass); /* for the completion */
    complete(f, pass, a);
    end(pass);
    complete(f, pass, b);
    ck_assert(launched(a) && launched(b));
    ck_assert_uint_eq(counts(f).pending + counts(f).in_flight, 0);
    backward(b);
    ck_assert_int_eq(of_pass_ready(pass, b->slot, &at), OF_TWICE);
    ck_assert_uint_eq(at, b->slot);
    of_pass_release(pass);
    step_only(f);
    teardown(f);
}

TEST(a_pass_outlives_its_plan) {
    fixture *f = setup(OF_BACKWARD, BUCKET);
    twin *t = add(f, 10);
    size_t at = 0;
    of_pass *pass = begin(f, 1, true);
    backward(t);
    OK(of_pass_ready(pass, t->slot, &at));
    teardown_unchecked(f);
    INVALID(of_pass_ready(pass, 0, &at), "");
    end(pass);
}

BACKWARD(a_failure_in_ready_leaves_what_waited_to_step, BUCKET) {
    twin *a = add(f, 10), *b = add(f, 2000);
    size_t at = 0;
    of_pass *pass = begin(f, 1, true);
    backward(a);
    backward(b);
    a->tensor->broken = true;
    OK(of_pass_ready(pass, a->slot, &at));
    INVALID(of_pass_ready(pass, b->slot, &at), "");
    ck_assert_uint_eq(at, a->slot);
    a->tensor->broken = false;
    end(pass);
    ck_assert(!of_plan_unconfirmed(f->plan) && counts(f).created == 0);
    expect_update(f, a);
    expect_update(f, b);
    step_only(f);
}

BACKWARD(step_in_the_middle_of_a_pass_takes_what_waits, BUCKET) {
    twin *t = add(f, 10);
    of_pass *pass = begin(f, 1, true);
    complete(f, pass, t);
    step_only(f);
    ck_assert(launched(t));
    complete(f, pass, t);
    end(pass);
    step_only(f);
}

BACKWARD(a_pass_that_the_host_refuses_has_not_begun, BUCKET) {
    of_pass *pass = NULL;
    bool first = true;
    f->host->refuses = true;
    FAILS(OF_REFUSED, of_pass_begin(f->plan, 1, &pass, &first),
          "the host is not ready for backward");
    ck_assert(!pass && !first);
    f->host->refuses = false;
    end(begin(f, 1, true));
}

static fixture *counting(size_t passes) {
    fixture *f = setup(OF_BACKWARD, BUCKET);
    of_plan_release(f->plan);
    of_plan_options options = {.struct_size = sizeof options,
                               .mode = OF_BACKWARD,
                               .reference = OF_REF_CPU_FUSED,
                               .vector_bytes = 64,
                               .isa = of_isa_detect(),
                               .passes = passes};
    OK(of_plan_create(&f->host->table, "adam", &options, &f->plan));
    set_lr(f, 0, f->hyper[0][0]);
    return f;
}

static void add_pass(fixture *f, of_token token, twin *t, bool only_adds) {
    of_pass *pass = begin(f, token, true);
    ck_assert_int_eq(of_pass_only_adds(pass), only_adds);
    size_t at = 0;
    OK(of_pass_ready(pass, t->slot, &at));
    end(pass);
    ck_assert_int_eq(of_plan_is_updated(f->plan, t->slot), !only_adds);
}

WITH(all_but_the_last_of_the_counted_passes_only_add, counting(3), teardown) {
    twin *t = add(f, 10);
    of_token token = 0;
    for (int step = 0; step < 3; step++) {
        backward(t);
        for (int i = 0; i < 2; i++)
            add_pass(f, ++token, t, true);
        expect_update(f, t);
        add_pass(f, ++token, t, false);
        step_only(f);
    }
    ck_assert_int_eq(atomic_load(&f->host->begun), 9);
    ck_assert_int_eq(atomic_load(&f->host->begun_adding), 6);
    backward(t);
    add_pass(f, ++token, t, true);
    expect_update(f, t);
    step_only(f); /* a step of fewer passes */
    backward(t);
    add_pass(f, ++token, t, true);
    of_plan_restart_count(f->plan); /* its gradients are thrown away */
    add_pass(f, ++token, t, true);
    fake_set_grad(t->tensor, NULL);
}

WITH(a_pass_with_two_beginnings_counts_once_and_a_refused_one_not_at_all, counting(2), teardown) {
    of_pass *pass = NULL;
    bool first;
    f->host->refuses = true;
    ck_assert_int_eq(of_pass_begin(f->plan, 7, &pass, &first), OF_REFUSED);
    f->host->refuses = false;
    pass = begin(f, 8, true);
    of_pass_release(begin(f, 8, false));
    ck_assert(of_pass_only_adds(pass));
    end(pass);
    pass = begin(f, 9, true);
    ck_assert(!of_pass_only_adds(pass));
    end(pass);
}

BACKWARD(passes_that_begin_in_a_context_only_add, BUCKET) {
    twin *t = add(f, 10);
    backward(t);
    of_pass *before = begin(f, 1, true);
    of_plan_add_only(f->plan, 1);
    of_plan_add_only(f->plan, 1);
    of_plan_add_only(f->plan, -1);
    add_pass(f, 2, t, true);
    ck_assert_msg(!of_pass_only_adds(before), "what a pass does is settled when it begins");
    ck_assert_int_eq(atomic_load(&f->host->begun), 1);
    of_plan_add_only(f->plan, -1);
    end(before);
    expect_update(f, t);
    add_pass(f, 3, t, false);
    step_only(f);
}

BACKWARD(adding_to_what_was_updated_is_refused, BUCKET) {
    twin *t = add(f, 10);
    size_t at = 9;
    of_pass *pass = begin(f, 1, true);
    complete(f, pass, t);
    end(pass);
    of_plan_add_only(f->plan, 1);
    pass = begin(f, 2, true);
    FAILS(OF_TWICE, of_pass_ready(pass, t->slot, &at), "call step() first");
    ck_assert_uint_eq(at, t->slot);
    of_pass_release(pass);
    of_plan_add_only(f->plan, -1);
    step_only(f);
}

/* Threads */

enum { THREADS = 4, EACH = 8, ROUNDS = 50 };

typedef struct crowd {
    fixture *f;
    pthread_barrier_t barrier;
    atomic_int next;
    atomic_int wrong;
    atomic_uint_least64_t token; /* 0: each thread has passes of its own */
    atomic_int firsts;
} crowd;

static void *train_one(void *opaque) {
    crowd *c = opaque;
    const size_t number = (size_t)atomic_fetch_add(&c->next, 1);
    size_t at = 0;
    for (size_t round = 0; round < ROUNDS; round++) {
        pthread_barrier_wait(&c->barrier);
        const of_token shared = atomic_load(&c->token);
        const of_token token = shared ? shared : round * THREADS + number + 1;
        of_pass *pass = NULL;
        bool first = false;
        for (size_t i = 0; i < EACH; i++) { /* as hooks do: each finds the pass anew */
            bool is_first = false;
            of_pass *found = NULL;
            if (of_pass_begin(c->f->plan, token, &found, &is_first) != OF_OK)
                abort();
            if (of_pass_ready(found, number * EACH + i, &at) != OF_OK)
                atomic_fetch_add(&c->wrong, 1);
            first = first || is_first;
            if (!pass)
                pass = found;
            else
                of_pass_release(found);
        }
        atomic_fetch_add(&c->firsts, first);
        if (shared)
            pthread_barrier_wait(&c->barrier);
        if (!shared || first)
            if (of_pass_end(pass, &at) != OF_OK)
                atomic_fetch_add(&c->wrong, 1);
        of_pass_release(pass);
        pthread_barrier_wait(&c->barrier);
    }
    return NULL;
}

/* Each with a pass of its own, or with one that all share. */
TESTS(threads_train_together, 2) {
    const bool shared = row != 0;
    crowd c = {.f = setup(OF_BACKWARD, BUCKET)};
    pthread_t threads[THREADS];
    c.f->host->n_threads = 1;
    for (int i = 0; i < THREADS * EACH; i++)
        add(c.f, i % 3 ? 100 + i : 1200);
    pthread_barrier_init(&c.barrier, NULL, THREADS + 1);
    for (int i = 0; i < THREADS; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, train_one, &c), 0);
    for (int round = 0; round < ROUNDS; round++) {
        backward_expected(c.f);
        if (shared)
            atomic_fetch_add(&c.token, 1);
        for (int i = 0; i < 2 + shared; i++)
            pthread_barrier_wait(&c.barrier);
        ck_assert_uint_eq(of_plan_unconfirmed(c.f->plan), THREADS * EACH);
        step_only(c.f);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&c.barrier);
    ck_assert_int_eq(atomic_load(&c.wrong), 0);
    ck_assert_int_eq(atomic_load(&c.firsts), shared ? ROUNDS : ROUNDS * THREADS);
    teardown(c.f);
}
