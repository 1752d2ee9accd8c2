/* SPDX-License-Identifier: BSD-3-Clause */
/* When the sums of factors are sent, and what comes too late for that. */
#include <pthread.h>

#include "fixture.h"
#include "planners/kfac/factors.h"

enum { SLOTS = 4, MOST = 64, THREADS = 4, ROUNDS = 500 };
static const size_t elements[SLOTS] = {3, 1, 6, 10};
/* As first used: slots 0 and 2 in forward, 3 and 1 in backward; 2 and 3 share a message. */
static const uint32_t order[SLOTS] = {0, 2, 3, 1};
static const uint32_t group[SLOTS] = {0, 1, 1, 2};

/* A host that keeps one number for each element. */
static struct {
    double sums[MOST], late[MOST];
    size_t offsets[MOST], sizes[MOST];
    size_t sent;
    bool fails;
} seen;

static bool add_number(void *ctx, const void *contribution, size_t offset, bool late) {
    const double given = *(const double *)contribution;
    (void)ctx;
    (late ? seen.late : seen.sums)[offset] += given;
    return given >= 0;
}

static bool reduce(void *ctx, size_t offset, size_t n) {
    (void)ctx;
    seen.offsets[seen.sent] = offset;
    seen.sizes[seen.sent++] = n;
    return !seen.fails;
}

static of_factors *make(void) {
    const of_factors_host table = {
        .struct_size = sizeof table, .add = add_number, .reduce = reduce};
    of_factors *made = NULL;
    OK(of_factors_create(elements, SLOTS, &table, &made));
    OK(of_factors_arrange(made, order, group));
    return made;
}

static uint64_t begin(of_factors *factors) {
    memset(&seen, 0, sizeof seen);
    return of_factors_begin(factors);
}

static void contribute(of_factors *factors, size_t slot, uint64_t collection, double value) {
    OK(of_factors_add(factors, slot, collection, 2, value, &value));
}

static void check_sent(size_t n) {
    static const size_t offsets[] = {0, 3, 19}, sizes[] = {3, 16, 1};
    ck_assert_uint_eq(seen.sent, n);
    for (size_t i = 0; i < n; i++)
        ck_assert_msg(seen.offsets[i] == offsets[i] && seen.sizes[i] == sizes[i],
                      "message %zu: %zu elements from %zu on", i, seen.sizes[i], seen.offsets[i]);
}

/* One use of each, after which it is known how many there will be. */
static void learn(of_factors *factors) {
    const uint64_t collection = begin(factors);
    for (size_t slot = 0; slot < SLOTS; slot++)
        contribute(factors, slot, collection, 1);
    ck_assert_uint_eq(seen.sent, 0);
    OK(of_factors_end(factors));
    check_sent(3);
}

static of_factors *factors;
static of_factor_slot slots[SLOTS];

static void make_and_learn(void) {
    factors = make();
    learn(factors);
}

static void destroy(void) {
    of_factors_destroy(factors);
}

#define NEW(name) AROUND(name, factors = make(), destroy())
#define LEARNED(name) AROUND(name, make_and_learn(), destroy())

LEARNED(the_first_collection_is_sent_at_its_end) {
    of_factors_slots(factors, slots);
    ck_assert_uint_eq(slots[1].offset, 19);
    ck_assert_uint_eq(slots[1].uses, 1);
    ck_assert(slots[1].rows == 2 && slots[1].seconds == 1 && !slots[1].late);
    ck_assert_uint_eq(of_factors_sent(factors), 3);
}

/* In each of the orders in which slots can be ready; the last of them never is, but for the end. */
TESTS(a_message_is_sent_when_its_slots_and_those_before_it_are_complete, 4 * 3 * 2) {
    size_t left[SLOTS] = {0, 1, 2, 3};
    bool complete[SLOTS] = {false};
    make_and_learn();
    const uint64_t collection = begin(factors);
    for (int n = SLOTS, choices = row; n > 1; choices /= n--) {
        const int chosen = choices % n;
        contribute(factors, left[chosen], collection, 1);
        complete[left[chosen]] = true;
        left[chosen] = left[n - 1];
        const size_t second = complete[2] && complete[3], third = second && complete[1];
        check_sent(complete[0] ? 1 + second + third : 0);
    }
    OK(of_factors_end(factors));
    check_sent(3);
    destroy();
}

LEARNED(what_comes_after_its_message_goes_into_the_second_buffer) {
    uint64_t collection = begin(factors);
    contribute(factors, 0, collection, 1);
    contribute(factors, 0, collection, 5);
    of_factors_slots(factors, slots);
    ck_assert(seen.sums[0] == 1 && seen.late[0] == 5 && slots[0].late && !slots[2].late);
    ck_assert(slots[0].uses == 2 && slots[0].rows == 4);
    OK(of_factors_end(factors));

    collection = begin(factors); /* two uses are waited for now */
    contribute(factors, 0, collection, 1);
    ck_assert_uint_eq(seen.sent, 0);
    contribute(factors, 0, collection, 5);
    ck_assert(seen.sums[0] == 6 && seen.sent == 1);
}

NEW(what_belongs_to_another_collection_is_ignored) {
    const uint64_t first = begin(factors);
    ck_assert_uint_eq(of_factors_collection(factors), first);
    OK(of_factors_end(factors));
    ck_assert_uint_eq(of_factors_collection(factors), 0);
    contribute(factors, 0, first, 1);
    contribute(factors, 0, 0, 1);
    const uint64_t second = begin(factors);
    ck_assert_uint_ne(second, first);
    contribute(factors, 0, first, 1);
    of_factors_slots(factors, slots);
    ck_assert(slots[0].uses == 0 && seen.sums[0] == 0);
}

NEW(an_end_without_a_collection_sends_nothing) {
    memset(&seen, 0, sizeof seen);
    OK(of_factors_end(factors));
    learn(factors);
    seen.sent = 0;
    OK(of_factors_end(factors));
    ck_assert_uint_eq(seen.sent, 0);
}

NEW(a_failure_of_the_host_is_told_once) {
    const uint64_t collection = begin(factors);
    const double bad = -1;
    FAILS(OF_REFUSED, of_factors_add(factors, 0, collection, 2, 0, &bad), "contribution");
    seen.fails = true;
    FAILS(OF_REFUSED, of_factors_end(factors), "message");
    check_sent(1);
    OK(of_factors_end(factors));
    learn(factors);
}

NEW(arrangements_that_are_none_are_refused) {
    static const uint32_t orders[][SLOTS] = {{0, 1, 2, 2}, {0, 1, 2, 4}};
    static const uint32_t groups[][SLOTS] = {{1, 1, 2, 3}, {0, 2, 2, 3}, {0, 1, 0, 1}};
    for (size_t i = 0; i < 2; i++)
        INVALID(of_factors_arrange(factors, orders[i], group), "");
    for (size_t i = 0; i < 3; i++)
        INVALID(of_factors_arrange(factors, order, groups[i]), "");
    begin(factors);
    INVALID(of_factors_arrange(factors, order, group), "while they are collected");
    OK(of_factors_end(factors));
    learn(factors);
}

TEST(factors_of_no_element_and_none_are_refused) {
    const of_factors_host table = {
        .struct_size = sizeof table, .add = add_number, .reduce = reduce};
    static const size_t none[] = {3, 0};
    of_factors *made = (of_factors *)&made;
    INVALID(of_factors_create(none, 2, &table, &made), "");
    ck_assert_ptr_null(made);
    INVALID(of_factors_create(elements, 0, &table, &made), "");
    of_factors_destroy(NULL);
}

static void *contribute_often(void *collection) {
    for (int i = 0; i < ROUNDS; i++)
        for (size_t slot = 0; slot < SLOTS; slot++)
            contribute(factors, slot, *(const uint64_t *)collection, 1);
    return NULL;
}

LEARNED(threads_may_contribute_at_once) {
    uint64_t collection = begin(factors);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, contribute_often, &collection), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    OK(of_factors_end(factors));
    check_sent(3);
    of_factors_slots(factors, slots);
    for (size_t slot = 0; slot < SLOTS; slot++) {
        const size_t at = slots[slot].offset;
        ck_assert_uint_eq(slots[slot].uses, (uint64_t)THREADS * ROUNDS);
        ck_assert(seen.sums[at] + seen.late[at] == THREADS * ROUNDS);
        ck_assert(slots[slot].late);
    }
}
