/* SPDX-License-Identifier: BSD-3-Clause */
/* How backward fusion stores parameters: past the caches while that is faster. */
#include <time.h>

#include "fixture.h"
#include "store_policy.h"

enum { LARGE = 50001, RARELY = 64 /* launches from trial to trial, in the end */ };

/* A machine on which stores past the caches take so many times as long, and to start the
 * threads twice as long as an update; returns the trials in this many launches. */
static int launches(of_store_policy *policy, double ratio, int n) {
    int trials = 0;
    for (int i = 0; i < n; i++)
        if (of_store_policy_try(policy)) {
            of_store_policy_found(policy, ratio + 2 * policy->past_first,
                                  1 + 2 * !policy->past_first);
            trials++;
        }
    return trials;
}

TEST(they_go_where_it_is_faster) {
    of_store_policy policy;
    of_store_policy_init(&policy);
    ck_assert_msg(!of_store_policy_is_past(&policy), "as usual, until a trial");
    launches(&policy, 0.3, 24);
    ck_assert(of_store_policy_is_past(&policy));
    launches(&policy, 0.3, 100);
    launches(&policy, 1.1, 4 * RARELY);
    ck_assert_msg(!of_store_policy_is_past(&policy), "the cores have become near each other");
    launches(&policy, 1.1, 100);
    launches(&policy, 0.3, 4 * RARELY);
    ck_assert_msg(of_store_policy_is_past(&policy), "the cores have become far from each other");
}

TEST(a_little_is_not_worth_it) {
    of_store_policy policy;
    of_store_policy_init(&policy);
    launches(&policy, 0.3, 24);
    launches(&policy, 0.9, 100);
    ck_assert(!of_store_policy_is_past(&policy));
}

TEST(one_disturbed_trial_changes_nothing) {
    of_store_policy policy;
    for (int far = 0; far < 2; far++) {
        of_store_policy_init(&policy);
        launches(&policy, far ? 0.3 : 1.1, 100);
        while (!of_store_policy_try(&policy))
            ;
        of_store_policy_found(&policy, far ? 1000 : 0, far ? 0 : 1000);
        launches(&policy, far ? 0.3 : 1.1, 2 * RARELY);
        ck_assert_int_eq(of_store_policy_is_past(&policy), far);
    }
}

TEST(trials_become_rare_and_take_turns) {
    of_store_policy policy;
    of_store_policy_init(&policy);
    ck_assert_int_ge(launches(&policy, 0.3, 60), 5);
    const int rare = launches(&policy, 0.3, 10 * RARELY);
    ck_assert_msg(rare >= 7 && rare <= 15, "%d trials", rare);
    const bool first = policy.past_first;
    while (!launches(&policy, 0.3, 1))
        ;
    ck_assert(policy.past_first != first);
}

/* In a model of so many layers, of which one's weight no other core has read. */
static bool finds_past(int layers, int unread) {
    of_store_policy policy;
    of_store_policy_init(&policy);
    for (int i = 0; i < 100 * layers; i++)
        launches(&policy, i % layers == unread ? 1.0 : 0.2, 1);
    return of_store_policy_is_past(&policy);
}

TEST(not_always_one_layer_is_tried) {
    for (int layers = 8; layers <= 64; layers *= 2)
        for (int unread = 0; unread < layers; unread++)
            ck_assert_msg(finds_past(layers, unread), "layer %d of %d", unread, layers);
}

/* Parallel regions beyond one a launch, in 40 iterations, each of which compares bits. */
static unsigned trials_of(of_mode mode, int threads, int64_t numel) {
    fixture *f = setup(mode, OF_BUCKET_NONE);
    f->host->n_threads = threads;
    twin *t = add(f, numel);
    for (int i = 0; i < 40; i++) {
        if (mode == OF_BACKWARD)
            gradient(f, t);
        else
            backward(t);
        step(f);
        check_twin(t);
    }
    const unsigned regions = (unsigned)atomic_load(&f->host->regions);
    const unsigned n = numel < OF_SERIAL_ELEMENTS ? 0 : (unsigned)counts(f).launches;
    teardown(f);
    return regions - n;
}

TEST(a_trial_changes_no_bits) {
    ck_assert_uint_ge(trials_of(OF_BACKWARD, 3, LARGE), 4);
}

/* Threads of a host that takes longer where stores go past the caches, or where not: in the
 * halves of trials, of which the first goes past them in each second trial. */
static struct {
    void (*parallel_for)(void *ctx, int64_t n, void (*fn)(void *, int64_t, int64_t), void *arg);
    int64_t all; /* what is less is a half */
    int halves;
    bool past_is_slow;
} machine;

static void slow_parallel_for(void *ctx, int64_t n, void (*fn)(void *, int64_t, int64_t),
                              void *arg) {
    machine.parallel_for(ctx, n, fn, arg);
    machine.all = n > machine.all ? n : machine.all;
    if (n == machine.all || n == 1) // the last of an odd number
        return;
    const int half = machine.halves++ % 4;
    if ((half == 0 || half == 3) == machine.past_is_slow)
        nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL);
}

TEST(a_trial_tells_which_is_faster) {
    fake_host *host = fake_host_new();
    machine.parallel_for = host->table.parallel_for;
    host->table.parallel_for = slow_parallel_for;
    fixture *f = setup_with(host, OF_BACKWARD, OF_BUCKET_NONE);
    twin *t = add(f, LARGE);
    ck_assert(!counts(f).past_caches);
    for (int slow = 0; slow < 2; slow++) {
        machine.past_is_slow = slow;
        for (int i = 0; i < 10 * RARELY && counts(f).past_caches == slow; i++) {
            gradient(f, t);
            step(f);
        }
        ck_assert_int_eq(counts(f).past_caches, !slow);
    }
    teardown(f);
}

static struct {
    int64_t begin, end;
} ran[3];
static size_t n_ran;

static void note(void *arg, int64_t begin, int64_t end, bool past_caches) {
    (void)arg, (void)past_caches;
    ran[n_ran].begin = begin;
    ran[n_ran++].end = end;
}

TEST(halves_of_a_trial_are_equal) {
    of_store_policy policy;
    of_store_policy_init(&policy);
    do {
        n_ran = 0;
        of_store_policy_run(&policy, 9, note, NULL);
    } while (n_ran == 1);
    ck_assert_uint_eq(n_ran, 3);
    ck_assert(ran[0].begin == 0 && ran[0].end == 4 && ran[1].begin == 4 && ran[1].end == 8);
    ck_assert(ran[2].begin == 8 && ran[2].end == 9);
}

TEST(nothing_is_tried_where_nobody_shares) {
    ck_assert_uint_eq(trials_of(OF_BACKWARD, 1, LARGE), 0);
    ck_assert_uint_eq(trials_of(OF_FORWARD, 3, LARGE), 0);
    ck_assert_uint_eq(trials_of(OF_BACKWARD, 3, OF_SERIAL_ELEMENTS - 1), 0);
}
