/* SPDX-License-Identifier: BSD-3-Clause */
/* Backward passes: tokens, what waits in which, threads, late completions, and passes that
 * only add. */
#include <stdlib.h>
#include <string.h>

#include "fake_device.h"
#include "fixture.h"

enum { BUCKET = 4000 }; /* bytes: 1000 float32 elements */

static of_pass *begin(const fixture *f, of_token token, bool first_one) {
    of_pass *pass = NULL;
    bool first = !first_one;
    ck_assert_msg(of_pass_begin(f->plan, token, &pass, &first) == OF_OK, "%s", of_error_message());
    ck_assert_int_eq(first, first_one);
    return pass;
}

static void complete(fixture *f, of_pass *pass, twin *t) {
    size_t at = 0;
    backward(t);
    expect_update(f, t);
    ck_assert_msg(of_pass_ready(pass, t->slot, &at) == OF_OK, "%s", of_error_message());
}

static void end(of_pass *pass) {
    size_t at = 0;
    ck_assert_msg(of_pass_end(pass, &at) == OF_OK, "%s", of_error_message());
    of_pass_release(pass);
}

static void confirm(const fixture *f) {
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
}

START_TEST(a_token_is_one_pass_until_it_ends) {
    fixture *f = setup(OF_BACKWARD, BUCKET);
    twin *a = add(f, 10);
    twin *b = add(f, 10);
    of_pass *pass = begin(f, UINT64_MAX, true);
    of_pass *again = begin(f, UINT64_MAX, false);
    ck_assert_ptr_eq(pass, again);
    ck_assert_int_eq(atomic_load(&f->host->begun), 1);
    complete(f, pass, a);
    complete(f, again, b);
    of_pass_release(again);
    end(pass);
    ck_assert(launched(a) && launched(b));
    confirm(f);
    pass = begin(f, UINT64_MAX, true); /* a token may be used again */
    complete(f, pass, a);
    end(pass);
    confirm(f);
    ck_assert_int_eq(atomic_load(&f->host->begun), 2);
    teardown(f);
}
END_TEST

START_TEST(small_gradients_wait_until_they_have_the_bytes_of_a_bucket) {
    fixture *f = setup(OF_BACKWARD, BUCKET);
    for (int i = 0; i < 4; i++)
        add(f, 300);
    of_pass *pass = begin(f, 1, true);
    for (size_t i = 0; i < 3; i++)
        complete(f, pass, &f->twins[i]);
    ck_assert_uint_eq(counts(f).created, 0);
    ck_assert_ptr_nonnull(f->twins[0].tensor->grad);
    complete(f, pass, &f->twins[3]);
    ck_assert_uint_eq(counts(f).created, 4);
    ck_assert_uint_eq(counts(f).launches, 1);
    end(pass);
    confirm(f);
    teardown(f);
}
END_TEST

START_TEST(what_waits_can_be_run_before_the_end) {
    fixture *f = setup(OF_BACKWARD, BUCKET);
    size_t at = 0;
    twin *a = add(f, 10);
    twin *b = add(f, 10);
    of_pass *pass = begin(f, 1, true);
    of_pass *other = begin(f, 2, true);
    complete(f, other, b);
    complete(f, pass, a);
    ck_assert_uint_eq(counts(f).created, 0);
    ck_assert_int_eq(of_pass_run(pass, &at), OF_OK);
    ck_assert(launched(a) && !of_plan_is_updated(f->plan, b->slot));
    twin *c = add(f, 10); /* the pass goes on */
    complete(f, pass, c);
    ck_assert(!of_plan_is_updated(f->plan, c->slot));
    end(pass);
    end(other);
    ck_assert(launched(b) && launched(c));
    confirm(f);
    teardown(f);
}
END_TEST

START_TEST(what_is_large_takes_along_what_waits) {
    for (int by_elements = 0; by_elements < 2; by_elements++) {
        fixture *f = setup(OF_BACKWARD, by_elements ? 0 : BUCKET);
        twin *small = add(f, by_elements ? OF_SERIAL_ELEMENTS - 1 : 999);
        twin *large = add(f, by_elements ? OF_SERIAL_ELEMENTS : 1000);
        of_pass *pass = begin(f, 1, true);
        complete(f, pass, small);
        ck_assert_uint_eq(counts(f).created, 0);
        complete(f, pass, large);
        ck_assert(launched(small) && launched(large));
        end(pass);
        confirm(f);
        teardown(f);
    }
}
END_TEST

START_TEST(two_passes_each_take_their_own) {
    fixture *f = setup(OF_BACKWARD, BUCKET);
    twin *a = add(f, 10);
    twin *b = add(f, 10);
    of_pass *first = begin(f, 1, true);
    of_pass *second = begin(f, 2, true);
    complete(f, first, a);
    complete(f, second, b);
    end(second);
    ck_assert(launched(b) && !of_plan_is_updated(f->plan, a->slot));
    end(first);
    ck_assert(launched(a));
    confirm(f);
    teardown(f);
}
END_TEST

/* The gradient has both by then, and step() applies the sum. */
START_TEST(what_two_passes_add_to_is_left_to_step) {
    fixture *f = setup(OF_BACKWARD, BUCKET);
    twin *t = add(f, 10);
    size_t at = 0;
    of_pass *first = begin(f, 1, true);
    of_pass *second = begin(f, 2, true);
    backward(t);
    expect_update(f, t);
    ck_assert_int_eq(of_pass_ready(first, t->slot, &at), OF_OK);
    ck_assert_int_eq(of_pass_ready(second, t->slot, &at), OF_OK);
    end(first);
    end(second);
    ck_assert(!of_plan_unconfirmed(f->plan) && counts(f).created == 0);
    ck_assert_uint_eq(counts(f).in_step, 0);
    confirm(f);
    ck_assert(launched(t));
    ck_assert_uint_eq(counts(f).in_step, 1);
    teardown(f);
}
END_TEST

START_TEST(an_abandoned_pass_leaves_its_gradients_to_step) {
    for (int how = 0; how < 2; how++) {
        fixture *f = setup(OF_BACKWARD, BUCKET);
        twin *a = add(f, 10);
        twin *b = add(f, 2000);
        of_pass *pass = begin(f, 1, true);
        complete(f, pass, a);
        if (how) { /* without a word */
            of_pass_release(pass);
        } else {
            of_pass_abandon(pass);
            complete(f, pass, b);
            end(pass);
        }
        ck_assert(!of_plan_unconfirmed(f->plan) && counts(f).created == 0);
        confirm(f);
        ck_assert(launched(a) && launched(b));
        teardown(f);
    }
}
END_TEST

START_TEST(what_is_ready_after_the_end_is_updated_at_once) {
    for (int on_device = 0; on_device < 2; on_device++) {
        fixture *f = on_device ? setup_on_device(OF_BACKWARD, BUCKET) : setup(OF_BACKWARD, BUCKET);
        twin *a = on_device ? add_on_device(f, 10, 0) : add(f, 10);
        twin *b = on_device ? add_on_device(f, 10, 0) : add(f, 10);
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
        confirm(f);
        teardown(f);
    }
}
END_TEST

START_TEST(a_pass_outlives_its_plan) {
    fixture *f = setup(OF_BACKWARD, BUCKET);
    twin *t = add(f, 10);
    size_t at = 0;
    of_pass *pass = begin(f, 1, true);
    backward(t);
    ck_assert_int_eq(of_pass_ready(pass, t->slot, &at), OF_OK);
    teardown_unchecked(f);
    ck_assert_int_eq(of_pass_ready(pass, 0, &at), OF_INVALID);
    end(pass);
}
END_TEST

START_TEST(a_failure_in_ready_leaves_what_waited_to_step) {
    fixture *f = setup(OF_BACKWARD, BUCKET);
    twin *a = add(f, 10);
    twin *b = add(f, 2000);
    size_t at = 0;
    of_pass *pass = begin(f, 1, true);
    backward(a);
    backward(b);
    a->tensor->broken = true;
    ck_assert_int_eq(of_pass_ready(pass, a->slot, &at), OF_OK);
    ck_assert_int_eq(of_pass_ready(pass, b->slot, &at), OF_INVALID);
    ck_assert_uint_eq(at, a->slot);
    a->tensor->broken = false;
    end(pass);
    ck_assert(!of_plan_unconfirmed(f->plan) && counts(f).created == 0);
    expect_update(f, a);
    expect_update(f, b);
    confirm(f);
    teardown(f);
}
END_TEST

START_TEST(step_in_the_middle_of_a_pass_takes_what_waits) {
    fixture *f = setup(OF_BACKWARD, BUCKET);
    twin *t = add(f, 10);
    of_pass *pass = begin(f, 1, true);
    complete(f, pass, t);
    confirm(f);
    ck_assert(launched(t));
    complete(f, pass, t);
    end(pass);
    confirm(f);
    teardown(f);
}
END_TEST

START_TEST(a_pass_that_the_host_refuses_has_not_begun) {
    fixture *f = setup(OF_BACKWARD, BUCKET);
    of_pass *pass = NULL;
    bool first = true;
    f->host->refuses = true;
    ck_assert_int_eq(of_pass_begin(f->plan, 1, &pass, &first), OF_REFUSED);
    ck_assert_str_eq(of_error_message(), "the host is not ready for backward");
    ck_assert(!pass && !first);
    f->host->refuses = false;
    end(begin(f, 1, true));
    teardown(f);
}
END_TEST

static fixture *counting(size_t passes, bool on_device) {
    fake_host *host = fake_host_new();
    if (on_device)
        fake_device_attach(host);
    fixture *f = setup_with(host, OF_BACKWARD, BUCKET);
    of_plan_release(f->plan);
    of_plan_options options = {.struct_size = sizeof options,
                               .mode = OF_BACKWARD,
                               .reference = OF_REF_CPU_FUSED,
                               .vector_bytes = 64,
                               .isa = of_isa_detect(),
                               .passes = passes};
    ck_assert_int_eq(of_plan_create(&host->table, "adam", &options, &f->plan), OF_OK);
    ck_assert_int_eq(of_plan_set_group(f->plan, 0, f->hyper[0], of_plan_rule(f->plan)->n_hyper),
                     OF_OK);
    return f;
}

static void add_pass(fixture *f, of_token token, twin *t, bool only_adds) {
    of_pass *pass = begin(f, token, true);
    ck_assert_int_eq(of_pass_only_adds(pass), only_adds);
    size_t at = 0;
    ck_assert_int_eq(of_pass_ready(pass, t->slot, &at), OF_OK);
    end(pass);
    ck_assert_int_eq(of_plan_is_updated(f->plan, t->slot), !only_adds);
}

START_TEST(all_but_the_last_of_the_counted_passes_only_add) {
    fixture *f = counting(3, false);
    twin *t = add(f, 10);
    of_token token = 0;
    for (int step = 0; step < 3; step++) {
        backward(t);
        for (int i = 0; i < 2; i++)
            add_pass(f, ++token, t, true);
        expect_update(f, t);
        add_pass(f, ++token, t, false);
        confirm(f);
    }
    ck_assert_int_eq(atomic_load(&f->host->begun), 9);
    ck_assert_int_eq(atomic_load(&f->host->begun_adding), 6);
    backward(t);
    add_pass(f, ++token, t, true);
    expect_update(f, t);
    confirm(f); /* a step of fewer passes */
    backward(t);
    add_pass(f, ++token, t, true);
    of_plan_restart_count(f->plan); /* its gradients are thrown away */
    add_pass(f, ++token, t, true);
    fake_set_grad(t->tensor, NULL);
    teardown(f);
}
END_TEST

START_TEST(a_pass_with_two_beginnings_counts_once_and_a_refused_one_not_at_all) {
    fixture *f = counting(2, false);
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
    teardown(f);
}
END_TEST

START_TEST(passes_that_begin_in_a_context_only_add) {
    fixture *f = setup(OF_BACKWARD, BUCKET);
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
    confirm(f);
    teardown(f);
}
END_TEST

START_TEST(adding_to_what_was_updated_is_refused) {
    fixture *f = setup(OF_BACKWARD, BUCKET);
    twin *t = add(f, 10);
    size_t at = 9;
    of_pass *pass = begin(f, 1, true);
    complete(f, pass, t);
    end(pass);
    of_plan_add_only(f->plan, 1);
    pass = begin(f, 2, true);
    ck_assert_int_eq(of_pass_ready(pass, t->slot, &at), OF_TWICE);
    ck_assert_uint_eq(at, t->slot);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "call step() first"));
    of_pass_release(pass);
    of_plan_add_only(f->plan, -1);
    confirm(f);
    teardown(f);
}
END_TEST

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

static void *train(void *opaque) {
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

static void train_in_threads(bool shared) {
    crowd c = {.f = setup(OF_BACKWARD, BUCKET)};
    pthread_t threads[THREADS];
    c.f->host->n_threads = 1;
    for (int i = 0; i < THREADS * EACH; i++)
        add(c.f, i % 3 ? 100 + i : 1200);
    pthread_barrier_init(&c.barrier, NULL, THREADS + 1);
    for (int i = 0; i < THREADS; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, train, &c), 0);
    for (int round = 0; round < ROUNDS; round++) {
        backward_all(c.f);
        for (size_t i = 0; i < c.f->n; i++)
            expect_update(c.f, &c.f->twins[i]);
        if (shared)
            atomic_fetch_add(&c.token, 1);
        for (int i = 0; i < 2 + shared; i++)
            pthread_barrier_wait(&c.barrier);
        ck_assert_uint_eq(of_plan_unconfirmed(c.f->plan), THREADS * EACH);
        confirm(c.f);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&c.barrier);
    ck_assert_int_eq(atomic_load(&c.wrong), 0);
    ck_assert_int_eq(atomic_load(&c.firsts), shared ? ROUNDS : ROUNDS * THREADS);
    teardown(c.f);
}

START_TEST(threads_with_a_pass_each) {
    train_in_threads(false);
}
END_TEST

START_TEST(threads_that_share_a_pass) {
    train_in_threads(true);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("passes");
    TCase *tests = tcase_create("passes");
    tcase_add_test(tests, a_token_is_one_pass_until_it_ends);
    tcase_add_test(tests, small_gradients_wait_until_they_have_the_bytes_of_a_bucket);
    tcase_add_test(tests, what_waits_can_be_run_before_the_end);
    tcase_add_test(tests, what_is_large_takes_along_what_waits);
    tcase_add_test(tests, two_passes_each_take_their_own);
    tcase_add_test(tests, what_two_passes_add_to_is_left_to_step);
    tcase_add_test(tests, an_abandoned_pass_leaves_its_gradients_to_step);
    tcase_add_test(tests, what_is_ready_after_the_end_is_updated_at_once);
    tcase_add_test(tests, a_pass_outlives_its_plan);
    tcase_add_test(tests, a_failure_in_ready_leaves_what_waited_to_step);
    tcase_add_test(tests, step_in_the_middle_of_a_pass_takes_what_waits);
    tcase_add_test(tests, a_pass_that_the_host_refuses_has_not_begun);
    suite_add_tcase(suite, tests);
    TCase *adding = tcase_create("passes that only add");
    tcase_add_test(adding, all_but_the_last_of_the_counted_passes_only_add);
    tcase_add_test(adding, a_pass_with_two_beginnings_counts_once_and_a_refused_one_not_at_all);
    tcase_add_test(adding, passes_that_begin_in_a_context_only_add);
    tcase_add_test(adding, adding_to_what_was_updated_is_refused);
    suite_add_tcase(suite, adding);
    TCase *threads = tcase_create("threads");
    tcase_set_timeout(threads, 120);
    tcase_add_test(threads, threads_with_a_pass_each);
    tcase_add_test(threads, threads_that_share_a_pass);
    suite_add_tcase(suite, threads);
    return run(suite);
}
