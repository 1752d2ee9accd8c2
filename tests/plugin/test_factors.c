/* SPDX-License-Identifier: BSD-3-Clause */
/* When the sums of factors are sent, and what comes too late for that. */
#include <pthread.h>
#include <string.h>

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
    ck_assert_int_eq(of_factors_create(elements, SLOTS, &table, &made), OF_OK);
    ck_assert_int_eq(of_factors_arrange(made, order, group), OF_OK);
    return made;
}

static uint64_t begin(of_factors *factors) {
    memset(&seen, 0, sizeof seen);
    return of_factors_begin(factors);
}

static void contribute(of_factors *factors, size_t slot, uint64_t collection, double value) {
    ck_assert_int_eq(of_factors_add(factors, slot, collection, 2, value, &value), OF_OK);
}

static void check_sent(size_t n, const size_t *offsets, const size_t *sizes) {
    ck_assert_uint_eq(seen.sent, n);
    for (size_t i = 0; i < n; i++)
        ck_assert_msg(seen.offsets[i] == offsets[i] && seen.sizes[i] == sizes[i],
                      "message %zu: %zu elements from %zu on", i, seen.sizes[i], seen.offsets[i]);
}

static const size_t all_offsets[] = {0, 3, 19}, all_sizes[] = {3, 16, 1};

/* One use of each, after which it is known how many there will be. */
static void learn(of_factors *factors) {
    const uint64_t collection = begin(factors);
    for (size_t slot = 0; slot < SLOTS; slot++)
        contribute(factors, slot, collection, 1);
    ck_assert_uint_eq(seen.sent, 0);
    ck_assert_int_eq(of_factors_end(factors), OF_OK);
    check_sent(3, all_offsets, all_sizes);
}

START_TEST(the_first_collection_is_sent_at_its_end) {
    of_factors *factors = make();
    learn(factors);
    of_factor_slot slots[SLOTS];
    of_factors_slots(factors, slots);
    ck_assert_uint_eq(slots[1].offset, 19);
    ck_assert_uint_eq(slots[1].uses, 1);
    ck_assert(slots[1].rows == 2 && slots[1].seconds == 1 && !slots[1].late);
    ck_assert_uint_eq(of_factors_sent(factors), 3);
    of_factors_destroy(factors);
}
END_TEST

START_TEST(a_message_is_sent_when_its_slots_are_complete) {
    of_factors *factors = make();
    learn(factors);
    const uint64_t collection = begin(factors);
    contribute(factors, 0, collection, 1);
    check_sent(1, all_offsets, all_sizes);
    contribute(factors, 3, collection, 1);
    check_sent(1, all_offsets, all_sizes);
    contribute(factors, 2, collection, 1);
    check_sent(2, all_offsets, all_sizes);
    ck_assert_int_eq(of_factors_end(factors), OF_OK);
    check_sent(3, all_offsets, all_sizes);
    of_factors_destroy(factors);
}
END_TEST

START_TEST(messages_keep_their_order_whoever_is_ready_first) {
    of_factors *factors = make();
    learn(factors);
    const uint64_t collection = begin(factors);
    contribute(factors, 1, collection, 1);
    contribute(factors, 3, collection, 1);
    contribute(factors, 2, collection, 1);
    ck_assert_uint_eq(seen.sent, 0);
    contribute(factors, 0, collection, 1);
    check_sent(3, all_offsets, all_sizes);
    of_factors_destroy(factors);
}
END_TEST

START_TEST(what_comes_after_its_message_goes_into_the_second_buffer) {
    of_factors *factors = make();
    learn(factors);
    uint64_t collection = begin(factors);
    contribute(factors, 0, collection, 1);
    contribute(factors, 0, collection, 5);
    of_factor_slot slots[SLOTS];
    of_factors_slots(factors, slots);
    ck_assert(seen.sums[0] == 1 && seen.late[0] == 5 && slots[0].late && !slots[2].late);
    ck_assert(slots[0].uses == 2 && slots[0].rows == 4);
    ck_assert_int_eq(of_factors_end(factors), OF_OK);

    collection = begin(factors); /* two uses are waited for now */
    contribute(factors, 0, collection, 1);
    ck_assert_uint_eq(seen.sent, 0);
    contribute(factors, 0, collection, 5);
    ck_assert(seen.sums[0] == 6 && seen.sent == 1);
    of_factors_destroy(factors);
}
END_TEST

START_TEST(what_belongs_to_another_collection_is_ignored) {
    of_factors *factors = make();
    const uint64_t first = begin(factors);
    ck_assert_uint_eq(of_factors_collection(factors), first);
    ck_assert_int_eq(of_factors_end(factors), OF_OK);
    ck_assert_uint_eq(of_factors_collection(factors), 0);
    contribute(factors, 0, first, 1);
    contribute(factors, 0, 0, 1);
    const uint64_t second = begin(factors);
    ck_assert_uint_ne(second, first);
    contribute(factors, 0, first, 1);
    of_factor_slot slots[SLOTS];
    of_factors_slots(factors, slots);
    ck_assert(slots[0].uses == 0 && seen.sums[0] == 0);
    of_factors_destroy(factors);
}
END_TEST

START_TEST(an_end_without_a_collection_sends_nothing) {
    of_factors *factors = make();
    memset(&seen, 0, sizeof seen);
    ck_assert_int_eq(of_factors_end(factors), OF_OK);
    learn(factors);
    seen.sent = 0;
    ck_assert_int_eq(of_factors_end(factors), OF_OK);
    ck_assert_uint_eq(seen.sent, 0);
    of_factors_destroy(factors);
}
END_TEST

START_TEST(a_failure_of_the_host_is_told_once) {
    of_factors *factors = make();
    const uint64_t collection = begin(factors);
    const double bad = -1;
    ck_assert_int_eq(of_factors_add(factors, 0, collection, 2, 0, &bad), OF_REFUSED);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "contribution"));
    seen.fails = true;
    ck_assert_int_eq(of_factors_end(factors), OF_REFUSED);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "message"));
    check_sent(1, all_offsets, all_sizes);
    ck_assert_int_eq(of_factors_end(factors), OF_OK);
    learn(factors);
    of_factors_destroy(factors);
}
END_TEST

START_TEST(arrangements_that_are_none_are_refused) {
    static const uint32_t orders[][SLOTS] = {{0, 1, 2, 2}, {0, 1, 2, 4}};
    static const uint32_t groups[][SLOTS] = {{1, 1, 2, 3}, {0, 2, 2, 3}, {0, 1, 0, 1}};
    of_factors *factors = make();
    for (size_t i = 0; i < 2; i++)
        ck_assert_int_eq(of_factors_arrange(factors, orders[i], group), OF_INVALID);
    for (size_t i = 0; i < 3; i++)
        ck_assert_int_eq(of_factors_arrange(factors, order, groups[i]), OF_INVALID);
    begin(factors);
    ck_assert_int_eq(of_factors_arrange(factors, order, group), OF_INVALID);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "while they are collected"));
    ck_assert_int_eq(of_factors_end(factors), OF_OK);
    learn(factors);

    const of_factors_host table = {
        .struct_size = sizeof table, .add = add_number, .reduce = reduce};
    static const size_t none[] = {3, 0};
    of_factors *made = factors;
    ck_assert_int_eq(of_factors_create(none, 2, &table, &made), OF_INVALID);
    ck_assert_ptr_null(made);
    ck_assert_int_eq(of_factors_create(elements, 0, &table, &made), OF_INVALID);
    of_factors_destroy(NULL);
    of_factors_destroy(factors);
}
END_TEST

typedef struct of_work {
    of_factors *factors;
    uint64_t collection;
} of_work;

static void *contribute_often(void *given) {
    const of_work *work = given;
    for (int i = 0; i < ROUNDS; i++)
        for (size_t slot = 0; slot < SLOTS; slot++)
            contribute(work->factors, slot, work->collection, 1);
    return NULL;
}

START_TEST(threads_may_contribute_at_once) {
    of_factors *factors = make();
    learn(factors);
    of_work work = {.factors = factors, .collection = begin(factors)};
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        ck_assert_int_eq(pthread_create(&threads[i], NULL, contribute_often, &work), 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    ck_assert_int_eq(of_factors_end(factors), OF_OK);
    check_sent(3, all_offsets, all_sizes);
    of_factor_slot slots[SLOTS];
    of_factors_slots(factors, slots);
    for (size_t slot = 0; slot < SLOTS; slot++) {
        const size_t at = slots[slot].offset;
        ck_assert_uint_eq(slots[slot].uses, (uint64_t)THREADS * ROUNDS);
        ck_assert(seen.sums[at] + seen.late[at] == THREADS * ROUNDS);
        ck_assert(slots[slot].late);
    }
    of_factors_destroy(factors);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("factors");
    TCase *tests = tcase_create("factors");
    tcase_add_test(tests, the_first_collection_is_sent_at_its_end);
    tcase_add_test(tests, a_message_is_sent_when_its_slots_are_complete);
    tcase_add_test(tests, messages_keep_their_order_whoever_is_ready_first);
    tcase_add_test(tests, what_comes_after_its_message_goes_into_the_second_buffer);
    tcase_add_test(tests, what_belongs_to_another_collection_is_ignored);
    tcase_add_test(tests, an_end_without_a_collection_sends_nothing);
    tcase_add_test(tests, a_failure_of_the_host_is_told_once);
    tcase_add_test(tests, arrangements_that_are_none_are_refused);
    tcase_add_test(tests, threads_may_contribute_at_once);
    suite_add_tcase(suite, tests);
    return run(suite);
}
