/* SPDX-License-Identifier: BSD-3-Clause */
/* The messages that are fused. */
#include "planners/kfac/messages.h"

#include <math.h>

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

/* The finish of the groups of the first messages. */
static double finish_of(const work *w, const fused *f, size_t end) {
    work first = *w;
    unsigned closed = 0;
    first.n = end;
    for (size_t i = 0; i + 1 < end; i++)
        closed |= (unsigned)(f->group[i] != f->group[i + 1]) << i;
    return finish_by_definition(&first, closed);
}

static fused fuse(const work *w, of_fusion how, uint64_t threshold) {
    fused f = {.n_groups = 77};
    f.group[w->n] = 78;
    OK(of_fuse_messages(how, w->ready, w->bytes, w->n, &w->link, w->processor, threshold, f.group,
                        &f.n_groups));
    ck_assert_uint_eq(f.group[w->n], 78);
    ck_assert_uint_eq(f.n_groups, (size_t)f.group[w->n - 1] + 1);
    f.finish = finish_of(w, &f, w->n);
    return f;
}

/* That of a plan, and so its tie breaks, are checked against all groupings below. */
TEST(each_fusion_has_the_groups_of_its_definition) {
#define LINK                                                                                       \
    { .latency = 3, .seconds_per_byte = 1 }
    static const work w = {{0, 1, 2, 9, 10}, {4, 1, 5, 2, 3}, 5, LINK, 0},
                      waits = {{0, 3, 6}, {1, 1, 1}, 3, LINK, 0},
                      chain = {{0, 2, 4, 6}, {1, 1, 1, 1}, 4, LINK, 0};
    static const struct {
        const work *w;
        of_fusion how;
        uint64_t threshold;
        uint32_t group[5];
        double finish;
    } rows[] = {
        {&w, OF_FUSION_EACH, 99, {0, 1, 2, 3, 4}, 30},
        {&w, OF_FUSION_ALL, 0, {0, 0, 0, 0, 0}, 28},
        {&w, OF_FUSION_THRESHOLD, 0, {0, 1, 2, 3, 4}, 30},
        {&w, OF_FUSION_THRESHOLD, 5, {0, 0, 1, 2, 2}, 25},
        {&w, OF_FUSION_THRESHOLD, 6, {0, 0, 0, 1, 1}, 23},
        {&w, OF_FUSION_THRESHOLD, UINT64_MAX, {0, 0, 0, 0, 0}, 28},
        /* 1 waits 1 s, 2 another: both less than 3. 3 comes 7 s after the group could start at 2;
         * the group is through at 15, when 4 is ready. */
        {&w, OF_FUSION_PAPER, 0, {0, 0, 0, 1, 1}, 23},
        /* A wait as long as the latency is too long, unless the link is busy until then. */
        {&waits, OF_FUSION_PAPER, 0, {0, 1, 1}, 11},
        /* One short wait follows the other: from 6 to 13. */
        {&chain, OF_FUSION_PAPER, 0, {0, 0, 0, 0}, 13},
    };
    for (size_t k = 0; k < LENGTH(rows); k++) {
        const fused f = fuse(rows[k].w, rows[k].how, rows[k].threshold);
        ck_assert_double_eq(f.finish, rows[k].finish);
        for (size_t i = 0; i < rows[k].w->n; i++)
            ck_assert_msg(f.group[i] == rows[k].group[i], "row %zu, message %zu: %u instead of %u",
                          k, i, f.group[i], rows[k].group[i]);
    }
}

/* The finish of the group that ends before `end` is the least; no larger group is as early. */
static void check_end(const work *w, const fused *f, size_t end, double tolerance) {
    const double finish = finish_of(w, f, end), least = least_finish(w, end);
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

static double random_fraction(void) {
    return (double)random_below(1u << 30) / (1u << 30);
}

/* Seconds of any size, whose sums are rounded. */
static void make_uneven(work *w) {
    w->link = (of_network_link){.latency = 1e-2 * random_fraction(), .seconds_per_byte = 3e-10};
    w->processor *= 1e-3 * random_fraction();
    for (size_t i = 0; i < w->n; i++) {
        w->ready[i] = (i ? w->ready[i - 1] : 0) + 1e-2 * random_fraction();
        w->bytes[i] = random_below(40 << 20);
    }
}

/* As early as can be up to each end of a group, with as many groups; and no fewer are as early. */
static void check_costly_plan(const work *w, const fused *f, double tolerance) {
    const double least = least_finish(w, w->n);
    ck_assert_msg(f->finish <= least * (1 + tolerance), "%.17g instead of %.17g", f->finish, least);
    for (size_t groups = 1; groups < f->n_groups; groups++)
        ck_assert_double_gt(least_finish_in(w, w->n, groups), f->finish);
    for (size_t end = 1; end < w->n; end++) {
        if (f->group[end] == f->group[end - 1])
            continue;
        const double finish = finish_of(w, f, end);
        const double in_as_many = least_finish_in(w, end, f->group[end]);
        ck_assert_msg(finish <= in_as_many * (1 + tolerance), "%.17g instead of %.17g", finish,
                      in_as_many);
    }
}

/* Where messages cost nothing every group is; where they cost, the last with the fewest groups. */
TESTS(a_plan_is_through_as_early_as_any_grouping_can_be, 2 * 2) {
    const bool costs = row % 2, uneven = row / 2;
    const double tolerance = uneven ? 1e-12 : 0;
    size_t between = 0, alone = 0, fewer = 0;
    for (int round = 0; round < MANY; round++) {
        work w = costs ? random_messages_that_cost() : random_messages();
        if (uneven)
            make_uneven(&w);
        const fused f = fuse(&w, OF_FUSION_PLANNED, 0);
        between += f.n_groups > 1 && f.n_groups < w.n;
        alone += f.n_groups == w.n;
        if (!costs) {
            for (size_t end = w.n; end > 0; end--)
                if (end == w.n || f.group[end] != f.group[end - 1])
                    check_end(&w, &f, end, tolerance);
            continue;
        }
        check_costly_plan(&w, &f, tolerance);
        w.processor = 0;
        fewer += f.n_groups < fuse(&w, OF_FUSION_PLANNED, 0).n_groups;
    }
    if (!uneven)
        ck_assert_msg(between >= MANY / 20 && (costs ? fewer : alone) >= MANY / 20, "%zu, %zu, %zu",
                      between, alone, fewer);
}

TEST(messages_that_cost_more_than_they_save_are_one) {
    for (int round = 0; round < MANY; round++) {
        work w = random_messages();
        w.processor = 1e6;
        ck_assert_uint_eq(fuse(&w, OF_FUSION_PLANNED, 0).n_groups, 1);
    }
}

TEST(no_other_fusion_beats_a_plan) {
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

TEST(no_message_is_a_plan_of_no_group) {
    const of_network_link link = {.latency = 1};
    for (int how = 0; how <= OF_FUSION_PLANNED; how++) {
        size_t n_groups = 7;
        OK(of_fuse_messages((of_fusion)how, NULL, NULL, 0, &link, how % 2, 1, NULL, &n_groups));
        ck_assert_uint_eq(n_groups, 0);
    }
}

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
    INVALID(of_fuse_messages(c->how, c->ready, c->bytes, c->n, &c->link, c->processor, 0, group,
                             &n_groups),
            message);
    ck_assert(group[0] == 71 && group[1] == 72 && n_groups == 73);
}

TEST(bad_messages_are_refused_and_change_nothing) {
    static const double bad[] = {-1e-300, NAN, INFINITY};
#define REFUSED(change, words)                                                                     \
    do {                                                                                           \
        call c = fine;                                                                             \
        change;                                                                                    \
        refused(&c, words);                                                                        \
    } while (0)
    for (size_t i = 0; i < 3; i++) {
        REFUSED(c.ready[1] = bad[i], "message 1 is ready at");
        REFUSED(c.link.latency = bad[i], "neither may be negative or infinite");
        REFUSED(c.link.seconds_per_byte = bad[i], "neither may be negative or infinite");
        REFUSED(c.processor = bad[i], "s of the processor: give a time that is neither");
    }
    REFUSED(c.bytes[0] = UINT64_MAX, "do not fit 64 bits");
    REFUSED(c.link.latency = 1e308, "out of range");
    REFUSED(c.link.seconds_per_byte = 1e308, "out of range");
    REFUSED(c.processor = 1e308, "out of range");
    REFUSED(c.how = (of_fusion)5, "no fusion 5");
    REFUSED(c.how = (of_fusion)-1, "no fusion -1");
    REFUSED(c.n = SIZE_MAX, "more than there are groups");
}

/* One of them at a time. */
TESTS(missing_arrays_are_refused, 5) {
    uint32_t groups[] = {0, 0};
    size_t count;
    const double *ready = row == 0 ? NULL : fine.ready;
    const uint64_t *bytes = row == 1 ? NULL : fine.bytes;
    const of_network_link *link = row == 2 ? NULL : &fine.link;
    uint32_t *group = row == 3 ? NULL : groups;
    INVALID(of_fuse_messages(OF_FUSION_EACH, ready, bytes, 2, link, 0, 0, group,
                             row == 4 ? NULL : &count),
            "");
}
