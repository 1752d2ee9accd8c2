/* SPDX-License-Identifier: BSD-3-Clause */
/* The messages that are fused, and when the last of them is through. */
#include "planners/kfac/plan.h"

#include <math.h>
#include <string.h>

#include "../sample.h"
#include "fixture.h"
#include "random_work.h"

enum { MANY = DRAWN(4000), MOST = 10 };

typedef struct work {
    double ready[MOST];
    uint64_t bytes[MOST];
    size_t n;
    of_network_link link;
    double processor;
} work;

/* Small whole numbers, so that all sums are exact and no two finishes differ by less than 1. */
static work random_messages(void) {
    work w = {
        .n = 1 + random_below(MOST),
        .link = {.latency = (double)random_below(12), .seconds_per_byte = (double)random_below(3)}};
    const bool ascending = random_below(2);
    double now = 0;
    for (size_t i = 0; i < w.n; i++) {
        now = (ascending ? now : 0) + (double)random_below(ascending ? 12 : 60);
        w.ready[i] = now;
        w.bytes[i] = random_below(9);
    }
    return w;
}

static work random_messages_that_cost(void) {
    work w = random_messages();
    w.processor = 1 + (double)random_below(6);
    return w;
}

/* The definition: bit i of `closed` says that a group ends with message i. What follows a group is
 * ready later by the seconds that the processor sends it. */
static double finish_by_definition(const work *w, unsigned closed) {
    double through = 0, late = 0, all_ready = 0;
    for (size_t first = 0, end; first < w->n; first = end) {
        double start = through, bytes = 0;
        for (end = first; end < w->n; end++) {
            all_ready = fmax(all_ready, w->ready[end]);
            start = fmax(start, all_ready + late);
            bytes += (double)w->bytes[end];
            if (closed >> end & 1u) {
                end++;
                break;
            }
        }
        through = start + w->link.latency + bytes * w->link.seconds_per_byte;
        late += w->processor;
    }
    return through;
}

static size_t groups_of(unsigned closed) {
    size_t n = 1;
    for (; closed; closed >>= 1)
        n += closed & 1u;
    return n;
}

/* Over all groupings of the first messages, in so many groups; 0: in any number. */
static double least_finish_in(const work *w, size_t n, size_t groups) {
    work first = *w;
    double least = INFINITY;
    first.n = n;
    for (unsigned closed = 0; closed < 1u << (n - 1); closed++)
        if (!groups || groups_of(closed) == groups)
            least = fmin(least, finish_by_definition(&first, closed));
    return least;
}

static double least_finish(const work *w, size_t n) {
    return least_finish_in(w, n, 0);
}

typedef struct fused {
    uint32_t group[MOST + 1];
    size_t n_groups;
    double finish;
} fused;

static fused fuse(const work *w, of_fusion how, uint64_t threshold) {
    fused f = {.n_groups = 77};
    f.group[w->n] = 78;
    ck_assert_int_eq(of_fuse_messages(how, w->ready, w->bytes, w->n, &w->link, w->processor,
                                      threshold, f.group, &f.n_groups),
                     OF_OK);
    ck_assert_uint_eq(f.group[w->n], 78);
    ck_assert_uint_eq(f.n_groups, (size_t)f.group[w->n - 1] + 1);
    ck_assert_int_eq(
        of_fused_finish(w->ready, w->bytes, f.group, w->n, &w->link, w->processor, &f.finish),
        OF_OK);
    return f;
}

static void check_groups(const work *w, of_fusion how, uint64_t threshold,
                         const uint32_t *expected) {
    const fused f = fuse(w, how, threshold);
    for (size_t i = 0; i < w->n; i++)
        ck_assert_msg(f.group[i] == expected[i], "fusion %d, message %zu: %u instead of %u",
                      (int)how, i, f.group[i], expected[i]);
}

START_TEST(each_fusion_has_the_groups_of_its_definition) {
    static const work w = {.ready = {0, 1, 2, 9, 10},
                           .bytes = {4, 1, 5, 2, 3},
                           .n = 5,
                           .link = {.latency = 3, .seconds_per_byte = 1}};
    check_groups(&w, OF_FUSION_EACH, 99, (uint32_t[]){0, 1, 2, 3, 4});
    check_groups(&w, OF_FUSION_ALL, 0, (uint32_t[]){0, 0, 0, 0, 0});
    check_groups(&w, OF_FUSION_THRESHOLD, 0, (uint32_t[]){0, 1, 2, 3, 4});
    check_groups(&w, OF_FUSION_THRESHOLD, 5, (uint32_t[]){0, 0, 1, 2, 2});
    check_groups(&w, OF_FUSION_THRESHOLD, 6, (uint32_t[]){0, 0, 0, 1, 1});
    check_groups(&w, OF_FUSION_THRESHOLD, UINT64_MAX, (uint32_t[]){0, 0, 0, 0, 0});
    /* 1 waits 1 s, 2 another: both less than 3. 3 comes 7 s after the group could start at 2; the
     * group is through at 15, when 4 is ready. */
    check_groups(&w, OF_FUSION_PAPER, 0, (uint32_t[]){0, 0, 0, 1, 1});
    /* A wait as long as the latency is too long, unless the link is busy until then. */
    const work waits = {.ready = {0, 3, 6}, .bytes = {1, 1, 1}, .n = 3, .link = w.link};
    check_groups(&waits, OF_FUSION_PAPER, 0, (uint32_t[]){0, 1, 1});
    /* The paper's: from 2 to 15 and on to 23. The plan has the same finish, with 2 in the second
     * group: it could start at 9, and does at 10. */
    ck_assert_double_eq(fuse(&w, OF_FUSION_PAPER, 0).finish, 23);
    check_groups(&w, OF_FUSION_PLANNED, 0, (uint32_t[]){0, 0, 1, 1, 1});
    ck_assert_double_eq(fuse(&w, OF_FUSION_PLANNED, 0).finish, 23);
    /* By the paper's rule one short wait follows the other: from 6 to 13. */
    const work chain = {.ready = {0, 2, 4, 6}, .bytes = {1, 1, 1, 1}, .n = 4, .link = w.link};
    check_groups(&chain, OF_FUSION_PAPER, 0, (uint32_t[]){0, 0, 0, 0});
    ck_assert_double_eq(fuse(&chain, OF_FUSION_PAPER, 0).finish, 13);
    check_groups(&chain, OF_FUSION_PLANNED, 0, (uint32_t[]){0, 1, 1, 1});
    ck_assert_double_eq(fuse(&chain, OF_FUSION_PLANNED, 0).finish, 12);
    /* With the first two in one group the last one would be through as early; and later, if the
     * second one is ready after 15. */
    const work spare = {.ready = {0, 10, 20}, .bytes = {1, 1, 1}, .n = 3, .link = w.link};
    check_groups(&spare, OF_FUSION_PLANNED, 0, (uint32_t[]){0, 1, 2});
    /* At 1 s a message they are through at 26, as with the first two in one group at 25, and with
     * all in one at 26. */
    work costs = spare;
    costs.processor = 1;
    check_groups(&costs, OF_FUSION_PLANNED, 0, (uint32_t[]){0, 0, 1});
    ck_assert_double_eq(fuse(&costs, OF_FUSION_EACH, 0).finish, 26);
    ck_assert_double_eq(fuse(&costs, OF_FUSION_PLANNED, 0).finish, 25);
    ck_assert_double_eq(fuse(&costs, OF_FUSION_ALL, 0).finish, 26);
    costs.processor = 2;
    check_groups(&costs, OF_FUSION_PLANNED, 0, (uint32_t[]){0, 0, 0});
}
END_TEST

START_TEST(a_finish_is_that_of_the_definition) {
    for (int round = 0; round < MANY; round++) {
        const work w = round % 2 ? random_messages() : random_messages_that_cost();
        const unsigned closed = (unsigned)random_below(1u << (w.n - 1));
        uint32_t group[MOST] = {0};
        for (size_t i = 1; i < w.n; i++)
            group[i] = group[i - 1] + (closed >> (i - 1) & 1u);
        double finish = -1;
        ck_assert_int_eq(
            of_fused_finish(w.ready, w.bytes, group, w.n, &w.link, w.processor, &finish), OF_OK);
        ck_assert_double_eq(finish, finish_by_definition(&w, closed));
    }
}
END_TEST

/* The finish of the group that ends before `end` is the least; no larger group is as early. */
static void check_end(const work *w, const fused *f, size_t end, double tolerance) {
    double finish = 0;
    ck_assert_int_eq(of_fused_finish(w->ready, w->bytes, f->group, end, &w->link, 0, &finish),
                     OF_OK);
    const double least = least_finish(w, end);
    ck_assert_msg(finish <= least * (1 + tolerance), "%.17g instead of %.17g", finish, least);
    size_t first = end - 1;
    while (first > 0 && f->group[first - 1] == f->group[end - 1])
        first--;
    for (size_t larger = 0; larger < first && tolerance == 0; larger++) {
        double start = larger ? least_finish(w, larger) : 0, bytes = 0;
        for (size_t i = larger; i < end; i++) {
            start = fmax(start, w->ready[i]);
            bytes += (double)w->bytes[i];
        }
        ck_assert_double_gt(start + w->link.latency + bytes * w->link.seconds_per_byte, finish);
    }
}

static size_t check_plan(const work *w, double tolerance) {
    const fused f = fuse(w, OF_FUSION_PLANNED, 0);
    for (size_t end = w->n; end > 0; end--)
        if (end == w->n || f.group[end] != f.group[end - 1])
            check_end(w, &f, end, tolerance);
    return f.n_groups;
}

START_TEST(every_group_of_a_plan_is_through_as_early_as_any_grouping_can_be) {
    size_t groups = 0, alone = 0;
    for (int round = 0; round < MANY; round++) {
        const work w = random_messages();
        const size_t n = check_plan(&w, 0);
        groups += n > 1 && n < w.n;
        alone += n == w.n;
    }
    ck_assert_uint_ge(groups, MANY / 20);
    ck_assert_uint_ge(alone, MANY / 20);
}
END_TEST

static double random_fraction(void) {
    return (double)random_below(1u << 30) / (1u << 30);
}

START_TEST(a_plan_of_any_numbers_is_as_good_up_to_rounding) {
    for (int round = 0; round < MANY; round++) {
        work w = random_messages();
        w.link = (of_network_link){.latency = 1e-2 * random_fraction(), .seconds_per_byte = 3e-10};
        for (size_t i = 0; i < w.n; i++) {
            w.ready[i] = (i ? w.ready[i - 1] : 0) + 1e-2 * random_fraction();
            w.bytes[i] = random_below(40 << 20);
        }
        check_plan(&w, 1e-12);
    }
}
END_TEST

/* As early as can be up to each end of a group, with as many groups; and no fewer are as early. */
static void check_costly_plan(const work *w, const fused *f, double tolerance) {
    const double least = least_finish(w, w->n);
    ck_assert_msg(f->finish <= least * (1 + tolerance), "%.17g instead of %.17g", f->finish, least);
    for (size_t groups = 1; groups < f->n_groups; groups++)
        ck_assert_double_gt(least_finish_in(w, w->n, groups), f->finish);
    for (size_t end = 1; end < w->n; end++) {
        if (f->group[end] == f->group[end - 1])
            continue;
        double finish = 0;
        ck_assert_int_eq(
            of_fused_finish(w->ready, w->bytes, f->group, end, &w->link, w->processor, &finish),
            OF_OK);
        const double in_as_many = least_finish_in(w, end, f->group[end]);
        ck_assert_msg(finish <= in_as_many * (1 + tolerance), "%.17g instead of %.17g", finish,
                      in_as_many);
    }
}

START_TEST(where_messages_cost_a_plan_is_through_as_early_as_any_grouping_with_the_fewest) {
    size_t groups = 0, fewer = 0;
    for (int round = 0; round < MANY; round++) {
        work w = random_messages_that_cost();
        const fused f = fuse(&w, OF_FUSION_PLANNED, 0);
        check_costly_plan(&w, &f, 0);
        groups += f.n_groups > 1 && f.n_groups < w.n;
        w.processor = 0;
        fewer += f.n_groups < fuse(&w, OF_FUSION_PLANNED, 0).n_groups;
    }
    ck_assert_msg(groups >= MANY / 20 && fewer >= MANY / 20, "%zu, %zu", groups, fewer);
}
END_TEST

START_TEST(a_plan_of_any_costs_is_as_good_up_to_rounding) {
    for (int round = 0; round < MANY; round++) {
        work w = random_messages();
        w.link = (of_network_link){.latency = 1e-2 * random_fraction(), .seconds_per_byte = 3e-10};
        w.processor = 1e-3 * random_fraction();
        for (size_t i = 0; i < w.n; i++) {
            w.ready[i] = (i ? w.ready[i - 1] : 0) + 1e-2 * random_fraction();
            w.bytes[i] = random_below(40 << 20);
        }
        const fused f = fuse(&w, OF_FUSION_PLANNED, 0);
        check_costly_plan(&w, &f, 1e-12);
    }
}
END_TEST

START_TEST(messages_that_cost_more_than_they_save_are_one) {
    for (int round = 0; round < MANY; round++) {
        work w = random_messages();
        w.processor = 1e6;
        ck_assert_uint_eq(fuse(&w, OF_FUSION_PLANNED, 0).n_groups, 1);
    }
}
END_TEST

START_TEST(no_other_fusion_beats_a_plan) {
    int worse[OF_FUSION_PLANNED] = {0};
    for (int round = 0; round < MANY; round++) {
        const work w = round % 2 ? random_messages() : random_messages_that_cost();
        const double planned = fuse(&w, OF_FUSION_PLANNED, 0).finish;
        for (of_fusion how = OF_FUSION_EACH; how < OF_FUSION_PLANNED; how++) {
            const double finish = fuse(&w, how, random_below(30)).finish;
            ck_assert_msg(finish >= planned, "fusion %d: %g before %g", (int)how, finish, planned);
            worse[how] += finish > planned;
        }
    }
    for (int how = 0; how < OF_FUSION_PLANNED; how++)
        ck_assert_msg(worse[how] >= MANY / 20, "fusion %d is worse in %d cases", how, worse[how]);
}
END_TEST

START_TEST(no_message_is_a_plan_of_no_group) {
    const of_network_link link = {.latency = 1};
    for (int how = 0; how <= OF_FUSION_PLANNED; how++) {
        size_t n_groups = 7;
        ck_assert_int_eq(
            of_fuse_messages((of_fusion)how, NULL, NULL, 0, &link, how % 2, 1, NULL, &n_groups),
            OF_OK);
        ck_assert_uint_eq(n_groups, 0);
    }
    double finish = 7;
    ck_assert_int_eq(of_fused_finish(NULL, NULL, NULL, 0, &link, 1, &finish), OF_OK);
    ck_assert_double_eq(finish, 0);
}
END_TEST

/* Two messages that are fine, until a test spoils one thing. */
typedef struct call {
    of_fusion how;
    double ready[2];
    uint64_t bytes[2];
    size_t n;
    of_network_link link;
    double processor;
} call;

static const call fine = {.how = OF_FUSION_PLANNED, .ready = {0, 1}, .bytes = {1, 1}, .n = 2};

/* Must be refused with these words, and write nothing. */
static void refused(const call *c, const char *message) {
    uint32_t group[] = {71, 72};
    size_t n_groups = 73;
    ck_assert_int_eq(of_fuse_messages(c->how, c->ready, c->bytes, c->n, &c->link, c->processor, 0,
                                      group, &n_groups),
                     OF_INVALID);
    ck_assert_msg(strstr(of_error_message(), message), "%s", of_error_message());
    ck_assert(group[0] == 71 && group[1] == 72 && n_groups == 73);
}

START_TEST(bad_messages_are_refused_and_change_nothing) {
    static const double bad[] = {-1e-300, NAN, INFINITY};
    call c;
    for (size_t i = 0; i < 3; i++) {
        c = fine;
        c.ready[1] = bad[i];
        refused(&c, "message 1 is ready at");
        c = fine;
        c.link.latency = bad[i];
        refused(&c, "neither may be negative or infinite");
        c = fine;
        c.link.seconds_per_byte = bad[i];
        refused(&c, "neither may be negative or infinite");
        c = fine;
        c.processor = bad[i];
        refused(&c, "s of the processor: give a time that is neither");
    }
    c = fine;
    c.bytes[0] = UINT64_MAX;
    refused(&c, "do not fit 64 bits");
    c = fine;
    c.link.latency = 1e308;
    refused(&c, "out of range");
    c = fine;
    c.link.seconds_per_byte = 1e308;
    refused(&c, "out of range");
    c = fine;
    c.processor = 1e308;
    refused(&c, "out of range");
    c = fine;
    c.how = (of_fusion)5;
    refused(&c, "no fusion 5");
    c.how = (of_fusion)-1;
    refused(&c, "no fusion -1");
    c = fine;
    c.n = SIZE_MAX;
    refused(&c, "more than there are groups");
}
END_TEST

START_TEST(missing_arrays_are_refused) {
    const double *ready = fine.ready;
    const uint64_t *bytes = fine.bytes;
    uint32_t group[] = {0, 0};
    size_t count;
    double finish;
    const of_fusion how = OF_FUSION_EACH;
    ck_assert_int_eq(of_fuse_messages(how, NULL, bytes, 2, &fine.link, 0, 0, group, &count),
                     OF_INVALID);
    ck_assert_int_eq(of_fuse_messages(how, ready, NULL, 2, &fine.link, 0, 0, group, &count),
                     OF_INVALID);
    ck_assert_int_eq(of_fuse_messages(how, ready, bytes, 2, NULL, 0, 0, group, &count), OF_INVALID);
    ck_assert_int_eq(of_fuse_messages(how, ready, bytes, 2, &fine.link, 0, 0, NULL, &count),
                     OF_INVALID);
    ck_assert_int_eq(of_fuse_messages(how, ready, bytes, 2, &fine.link, 0, 0, group, NULL),
                     OF_INVALID);
    ck_assert_int_eq(of_fused_finish(NULL, bytes, group, 2, &fine.link, 0, &finish), OF_INVALID);
    ck_assert_int_eq(of_fused_finish(ready, NULL, group, 2, &fine.link, 0, &finish), OF_INVALID);
    ck_assert_int_eq(of_fused_finish(ready, bytes, NULL, 2, &fine.link, 0, &finish), OF_INVALID);
    ck_assert_int_eq(of_fused_finish(ready, bytes, group, 2, NULL, 0, &finish), OF_INVALID);
    ck_assert_int_eq(of_fused_finish(ready, bytes, group, 2, &fine.link, 0, NULL), OF_INVALID);
}
END_TEST

START_TEST(groups_that_are_none_have_no_finish) {
    static const double ready[3] = {0};
    static const uint64_t bytes[3] = {1, 1, 1};
    static const uint32_t bad[][3] = {
        {1, 1, 1}, {0, 2, 2}, {0, 1, 0}, {UINT32_MAX, 0, 0}, {0, 0, UINT32_MAX}};
    double finish = 71;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        ck_assert_int_eq(of_fused_finish(ready, bytes, bad[i], 3, &fine.link, 0, &finish),
                         OF_INVALID);
        ck_assert_ptr_nonnull(strstr(of_error_message(), "Take groups from of_fuse_messages()"));
    }
    ck_assert_double_eq(finish, 71);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("K-FAC plan");
    TCase *tests = tcase_create("K-FAC plan");
    tcase_set_timeout(tests, 60);
    tcase_add_test(tests, each_fusion_has_the_groups_of_its_definition);
    tcase_add_test(tests, a_finish_is_that_of_the_definition);
    tcase_add_test(tests, every_group_of_a_plan_is_through_as_early_as_any_grouping_can_be);
    tcase_add_test(tests, a_plan_of_any_numbers_is_as_good_up_to_rounding);
    tcase_add_test(tests,
                   where_messages_cost_a_plan_is_through_as_early_as_any_grouping_with_the_fewest);
    tcase_add_test(tests, a_plan_of_any_costs_is_as_good_up_to_rounding);
    tcase_add_test(tests, messages_that_cost_more_than_they_save_are_one);
    tcase_add_test(tests, no_other_fusion_beats_a_plan);
    tcase_add_test(tests, no_message_is_a_plan_of_no_group);
    tcase_add_test(tests, bad_messages_are_refused_and_change_nothing);
    tcase_add_test(tests, missing_arrays_are_refused);
    tcase_add_test(tests, groups_that_are_none_have_no_finish);
    suite_add_tcase(suite, tests);
    return run(suite);
}
