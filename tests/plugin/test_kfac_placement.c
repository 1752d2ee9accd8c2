/* SPDX-License-Identifier: BSD-3-Clause */
/* The process that inverts each factor, and when every process has all inverses. */
#include <math.h>
#include <string.h>

#include "fixture.h"
#include "planners/kfac/plan.h"
#include "random_work.h"

enum { MANY = 4000, MOST = 12, PROCESSES = 5, RESNET_FACTORS = 108 };

/* ResNet-50's convolutions and its last layer, a block at a time. The factor A of a layer has a
 * row for each number of a patch, and one for the bias; G has one for each output channel. */
typedef struct layer {
    uint32_t inputs, kernel, outputs;
    bool bias;
} layer;

typedef struct stage {
    uint32_t width;
    int blocks;
} stage;

typedef struct factors {
    uint32_t sizes[RESNET_FACTORS]; /* A1, G1, A2, ... */
    size_t n;
} factors;

static void add_layer(factors *f, layer l) {
    ck_assert_uint_le(f->n + 2, RESNET_FACTORS);
    f->sizes[f->n++] = l.inputs * l.kernel * l.kernel + l.bias;
    f->sizes[f->n++] = l.outputs;
}

static factors resnet50(void) {
    static const stage stages[] = {{64, 3}, {128, 4}, {256, 6}, {512, 3}};
    factors f = {.n = 0};
    uint32_t inputs = 64;
    add_layer(&f, (layer){3, 7, 64, false});
    for (size_t s = 0; s < sizeof stages / sizeof *stages; s++) {
        const uint32_t width = stages[s].width;
        for (int block = 0; block < stages[s].blocks; block++) {
            add_layer(&f, (layer){inputs, 1, width, false});
            add_layer(&f, (layer){width, 3, width, false});
            add_layer(&f, (layer){width, 1, 4 * width, false});
            if (block == 0) /* the shortcut */
                add_layer(&f, (layer){inputs, 1, 4 * width, false});
            inputs = 4 * width;
        }
    }
    add_layer(&f, (layer){inputs, 1, 1000, true});
    return f;
}

START_TEST(resnet_50_has_the_factors_of_its_layers) {
    const factors f = resnet50();
    uint64_t packed[2] = {0};
    uint32_t largest = 0;
    size_t large = 0;
    for (size_t i = 0; i < f.n; i++) {
        packed[i % 2] += (uint64_t)f.sizes[i] * (f.sizes[i] + 1) / 2;
        largest = f.sizes[i] > largest ? f.sizes[i] : largest;
        large += f.sizes[i] >= 1024;
    }
    ck_assert_uint_eq(f.n, 108);
    ck_assert_uint_eq(largest, 4608);
    ck_assert_uint_eq(large, 34);
    ck_assert_uint_eq(packed[0], 62348671);
    ck_assert_uint_eq(packed[1], 14618356);
}
END_TEST

/* The largest load over the mean, to four decimals. */
static double imbalance(of_placement how, const factors *f, size_t processes) {
    int32_t owner[RESNET_FACTORS];
    double load[16], sum = 0, most = 0;
    ck_assert_int_eq(of_place_inverses(how, f->sizes, f->n, processes, 0, owner, load), OF_OK);
    for (size_t p = 0; p < processes; p++) {
        sum += load[p];
        most = fmax(most, load[p]);
    }
    return round(1e4 * most * (double)processes / sum) / 1e4;
}

START_TEST(resnet_50_is_balanced_as_well_as_it_was_elsewhere) {
    const factors f = resnet50();
    static const double in_turn[] = {1.8028, 2.1070, 3.7709, 3.9870};
    static const double balanced[] = {1.0000, 1.0000, 1.7287, 3.4574};
    for (int i = 0; i < 4; i++) {
        const size_t processes = (size_t)2 << i;
        ck_assert_double_eq(imbalance(OF_PLACEMENT_ROUND_ROBIN, &f, processes), in_turn[i]);
        ck_assert_double_eq(imbalance(OF_PLACEMENT_BALANCED, &f, processes), balanced[i]);
        ck_assert_double_eq(imbalance(OF_PLACEMENT_EVERYWHERE, &f, processes), 1);
    }
}
END_TEST

static void check_owners(of_placement how, uint32_t everywhere_below, const int32_t *expected,
                         const double *expected_load) {
    static const uint32_t sizes[] = {2, 5, 3, 5, 2, 4};
    int32_t owner[7] = {[6] = 77};
    double load[4] = {[3] = 78};
    ck_assert_int_eq(of_place_inverses(how, sizes, 6, 3, everywhere_below, owner, load), OF_OK);
    for (size_t i = 0; i < 6; i++)
        ck_assert_msg(owner[i] == expected[i], "placement %d, factor %zu: %d instead of %d",
                      (int)how, i, (int)owner[i], (int)expected[i]);
    for (size_t p = 0; p < 3; p++)
        ck_assert_double_eq(load[p], expected_load[p]);
    ck_assert(owner[6] == 77 && load[3] == 78);
    int32_t again[6];
    ck_assert_int_eq(of_place_inverses(how, sizes, 6, 3, everywhere_below, again, NULL), OF_OK);
    ck_assert_mem_eq(again, owner, sizeof again);
}

START_TEST(each_placement_is_that_of_its_definition) {
    /* 125 to 0, 125 to 1, 64 to 2, then 27, 8 and 8 to 2. */
    check_owners(OF_PLACEMENT_BALANCED, 0, (int32_t[]){2, 0, 2, 1, 2, 2},
                 (double[]){125, 125, 107});
    check_owners(OF_PLACEMENT_BALANCED, 3, (int32_t[]){-1, 0, 2, 1, -1, 2},
                 (double[]){125 + 16, 125 + 16, 91 + 16});
    check_owners(OF_PLACEMENT_ROUND_ROBIN, 0, (int32_t[]){0, 1, 2, 0, 1, 2},
                 (double[]){133, 133, 91});
    check_owners(OF_PLACEMENT_ROUND_ROBIN, 3, (int32_t[]){-1, 0, 1, 2, -1, 0},
                 (double[]){189 + 16, 27 + 16, 125 + 16});
    check_owners(OF_PLACEMENT_EVERYWHERE, 0, (int32_t[]){-1, -1, -1, -1, -1, -1},
                 (double[]){357, 357, 357});
    check_owners(OF_PLACEMENT_BALANCED, 6, (int32_t[]){-1, -1, -1, -1, -1, -1},
                 (double[]){357, 357, 357});
}
END_TEST

typedef struct work {
    uint32_t sizes[MOST];
    int32_t owner[MOST];
    size_t n, processes;
} work;

static work random_factors(void) {
    work w = {.n = random_below(MOST + 1), .processes = 1 + random_below(PROCESSES)};
    for (size_t i = 0; i < w.n; i++) {
        w.sizes[i] = (uint32_t)random_below(9);
        w.owner[i] = (int32_t)random_below(w.processes + 1) - 1;
    }
    return w;
}

/* The rank of factor i, counted: how many come before it. */
static size_t rank_of(const work *w, size_t i, bool descending) {
    size_t before = 0;
    for (size_t j = 0; j < w->n; j++) {
        const bool first = descending ? w->sizes[j] > w->sizes[i] : w->sizes[j] < w->sizes[i];
        before += first || (w->sizes[j] == w->sizes[i] && j < i);
    }
    return before;
}

static size_t at_rank(const work *w, size_t rank, bool descending) {
    size_t i = 0;
    while (rank_of(w, i, descending) != rank)
        i++;
    return i;
}

static double cube(uint32_t size) {
    return pow(size, 3);
}

START_TEST(balanced_owners_are_the_least_loaded_ones) {
    for (int round = 0; round < MANY; round++) {
        const work w = random_factors();
        const uint32_t below = (uint32_t)random_below(6);
        int32_t owner[MOST];
        double load[PROCESSES] = {0}, reported[PROCESSES], everywhere = 0;
        ck_assert_int_eq(of_place_inverses(OF_PLACEMENT_BALANCED, w.sizes, w.n, w.processes, below,
                                           owner, reported),
                         OF_OK);
        for (size_t rank = 0; rank < w.n; rank++) {
            const size_t i = at_rank(&w, rank, true);
            if (w.sizes[i] < below) {
                ck_assert_int_eq(owner[i], OF_EVERY_PROCESS);
                everywhere += cube(w.sizes[i]);
                continue;
            }
            for (size_t p = 0; p < w.processes; p++) {
                const bool lower = p < (size_t)owner[i];
                ck_assert(lower ? load[p] > load[owner[i]] : load[p] >= load[owner[i]]);
            }
            load[owner[i]] += cube(w.sizes[i]);
        }
        for (size_t p = 0; p < w.processes; p++)
            ck_assert_double_eq(reported[p], load[p] + everywhere);
    }
}
END_TEST

START_TEST(bad_placements_are_refused_and_change_nothing) {
    static const uint32_t sizes[] = {1, 2};
    int32_t owner[] = {71, 72};
    double load[] = {73, 74};
    const of_placement how = OF_PLACEMENT_BALANCED;
    ck_assert_int_eq(of_place_inverses(how, sizes, 2, 0, 0, owner, load), OF_INVALID);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "on 0 processes"));
    ck_assert_int_eq(of_place_inverses(how, sizes, 2, (size_t)INT32_MAX + 1, 0, owner, load),
                     OF_INVALID);
    ck_assert_int_eq(of_place_inverses(how, sizes, SIZE_MAX, 2, 0, owner, load), OF_INVALID);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "more than can be placed"));
    ck_assert_int_eq(of_place_inverses((of_placement)3, sizes, 2, 2, 0, owner, load), OF_INVALID);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "no placement 3"));
    ck_assert_int_eq(of_place_inverses((of_placement)-1, sizes, 2, 2, 0, owner, load), OF_INVALID);
    ck_assert_int_eq(of_place_inverses(how, NULL, 2, 2, 0, owner, load), OF_INVALID);
    ck_assert_int_eq(of_place_inverses(how, sizes, 2, 2, 0, NULL, load), OF_INVALID);
    ck_assert(owner[0] == 71 && owner[1] == 72 && load[0] == 73 && load[1] == 74);
    ck_assert_int_eq(of_place_inverses(how, NULL, 0, 2, 0, NULL, load), OF_OK);
    ck_assert(load[0] == 0 && load[1] == 0);
}
END_TEST

static double simulate(const work *w, of_inversion cost) {
    double seconds = -1;
    ck_assert_int_eq(of_simulate_inverses(&cost, w->sizes, w->owner, w->n, w->processes, &seconds),
                     OF_OK);
    return seconds;
}

START_TEST(the_seconds_of_inverses_are_those_counted_by_hand) {
    const work w = {.sizes = {3, 1, 2, 1}, .owner = {0, 0, 1, -1}, .n = 4, .processes = 2};
    of_inversion cost = {
        .cubic_coefficient = 1, .element_bytes = 2, .link = {.latency = 10, .seconds_per_byte = 1}};
    /* Inverted: 1 at 1, 2 at 8, 3 at 28. Sent in that order, for 10 + 2, 10 + 6 and 10 + 12 s:
     * from 1 to 13, to 29, to 51. */
    ck_assert_double_eq(simulate(&w, cost), 51);
    /* 3 at 27, 2 at 8, 1 at 28: 27 to 49, to 65, to 77. */
    cost.descending = true;
    ck_assert_double_eq(simulate(&w, cost), 77);
    /* Nothing to send: process 0 has its two and the one that all invert. */
    cost.link = (of_network_link){.latency = 0};
    ck_assert_double_eq(simulate(&w, cost), 27 + 1 + 1);
    cost.link.latency = 10;
    const work alone = {.sizes = {3, 1}, .owner = {0, -1}, .n = 2, .processes = 1};
    ck_assert_double_eq(simulate(&alone, cost), 28);
    const work none = {.processes = 3};
    ck_assert_double_eq(simulate(&none, cost), 0);
}
END_TEST

/* When factor i's process has inverted it. */
static double inverted_at(const work *w, const of_inversion *cost, size_t i) {
    double at = 0;
    for (size_t j = 0; j < w->n; j++)
        if (w->owner[j] == w->owner[i] &&
            rank_of(w, j, cost->descending) <= rank_of(w, i, cost->descending))
            at += cost->cubic_coefficient * cube(w->sizes[j]);
    return at;
}

/* The last broadcast is through when all from any one on have been sent since that was ready:
 * the latest of these moments is the true one. */
static double seconds_by_chains(const work *w, const of_inversion *cost) {
    double all = 0, everywhere = 0, sent = 0;
    for (size_t rank = w->n; rank-- > 0;) {
        const size_t i = at_rank(w, rank, cost->descending);
        if (w->owner[i] == OF_EVERY_PROCESS) {
            everywhere += cost->cubic_coefficient * cube(w->sizes[i]);
            continue;
        }
        const double elements = w->sizes[i] * (w->sizes[i] + 1.0) / 2;
        if (w->processes > 1)
            sent += cost->link.latency +
                    elements * (double)cost->element_bytes * cost->link.seconds_per_byte;
        all = fmax(all, inverted_at(w, cost, i) + sent);
    }
    for (size_t i = 0; i < w->n; i++)
        if (w->owner[i] != OF_EVERY_PROCESS)
            all = fmax(all, inverted_at(w, cost, i) + everywhere);
    return fmax(all, everywhere);
}

START_TEST(the_seconds_of_inverses_are_those_of_the_longest_chain) {
    for (int round = 0; round < MANY; round++) {
        const work w = random_factors();
        const of_inversion cost = {.cubic_coefficient = (double)random_below(3),
                                   .element_bytes = random_below(5),
                                   .link = {.latency = (double)random_below(40),
                                            .seconds_per_byte = (double)random_below(4)},
                                   .descending = random_below(2)};
        const double seconds = simulate(&w, cost), expected = seconds_by_chains(&w, &cost);
        ck_assert_msg(seconds == expected, "round %d: %g instead of %g", round, seconds, expected);
    }
}
END_TEST

/* Whole milliseconds, on 4 processes with the link of the paper. */
static double resnet_50_inverted(const factors *f, bool descending) {
    const of_inversion cost = {.cubic_coefficient = 1e-12,
                               .element_bytes = 4,
                               .link = {.latency = 9.29e-4, .seconds_per_byte = 1.4335e-9 / 4},
                               .descending = descending};
    int32_t owner[RESNET_FACTORS];
    double seconds = -1;
    ck_assert_int_eq(of_place_inverses(OF_PLACEMENT_BALANCED, f->sizes, f->n, 4, 0, owner, NULL),
                     OF_OK);
    ck_assert_int_eq(of_simulate_inverses(&cost, f->sizes, owner, f->n, 4, &seconds), OF_OK);
    return round(1e3 * seconds);
}

START_TEST(resnet_50_is_inverted_sooner_with_its_smallest_factors_first) {
    const factors f = resnet50();
    ck_assert_double_eq(resnet_50_inverted(&f, false), 211);
    ck_assert_double_eq(resnet_50_inverted(&f, true), 309);
}
END_TEST

START_TEST(bad_simulations_are_refused_and_change_nothing) {
    const of_inversion fine = {.cubic_coefficient = 1, .element_bytes = 4};
    const uint32_t sizes[] = {1, 2};
    int32_t owner[] = {0, 1};
    double out = 71;
    of_inversion cost = fine;
    static const double bad[] = {-1, NAN, INFINITY};
    for (size_t i = 0; i < 3; i++) {
        cost = fine;
        cost.cubic_coefficient = bad[i];
        ck_assert_int_eq(of_simulate_inverses(&cost, sizes, owner, 2, 2, &out), OF_INVALID);
        cost = fine;
        cost.link.latency = bad[i];
        ck_assert_int_eq(of_simulate_inverses(&cost, sizes, owner, 2, 2, &out), OF_INVALID);
        cost = fine;
        cost.link.seconds_per_byte = bad[i];
        ck_assert_int_eq(of_simulate_inverses(&cost, sizes, owner, 2, 2, &out), OF_INVALID);
    }
    cost = fine;
    cost.element_bytes = UINT64_MAX / 2;
    ck_assert_int_eq(of_simulate_inverses(&cost, sizes, owner, 2, 2, &out), OF_INVALID);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "does not fit 64 bits"));
    cost = fine;
    cost.cubic_coefficient = 1e308;
    ck_assert_int_eq(of_simulate_inverses(&cost, sizes, owner, 2, 2, &out), OF_INVALID);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "out of range"));
    ck_assert_int_eq(of_simulate_inverses(&fine, sizes, owner, 2, 0, &out), OF_INVALID);
    ck_assert_int_eq(of_simulate_inverses(&fine, sizes, owner, SIZE_MAX, 2, &out), OF_INVALID);
    ck_assert_int_eq(of_simulate_inverses(NULL, sizes, owner, 2, 2, &out), OF_INVALID);
    ck_assert_int_eq(of_simulate_inverses(&fine, NULL, owner, 2, 2, &out), OF_INVALID);
    ck_assert_int_eq(of_simulate_inverses(&fine, sizes, NULL, 2, 2, &out), OF_INVALID);
    ck_assert_int_eq(of_simulate_inverses(&fine, sizes, owner, 2, 2, NULL), OF_INVALID);
    ck_assert_int_eq(of_simulate_inverses(&fine, sizes, owner, 2, 1, &out), OF_INVALID);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "factor 1 is inverted by process 1 of 1"));
    owner[0] = -2;
    ck_assert_int_eq(of_simulate_inverses(&fine, sizes, owner, 2, 2, &out), OF_INVALID);
    owner[0] = INT32_MIN;
    ck_assert_int_eq(of_simulate_inverses(&fine, sizes, owner, 2, 2, &out), OF_INVALID);
    ck_assert_double_eq(out, 71);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("K-FAC placement");
    TCase *tests = tcase_create("K-FAC placement");
    tcase_add_test(tests, resnet_50_has_the_factors_of_its_layers);
    tcase_add_test(tests, resnet_50_is_balanced_as_well_as_it_was_elsewhere);
    tcase_add_test(tests, each_placement_is_that_of_its_definition);
    tcase_add_test(tests, balanced_owners_are_the_least_loaded_ones);
    tcase_add_test(tests, bad_placements_are_refused_and_change_nothing);
    tcase_add_test(tests, the_seconds_of_inverses_are_those_counted_by_hand);
    tcase_add_test(tests, the_seconds_of_inverses_are_those_of_the_longest_chain);
    tcase_add_test(tests, resnet_50_is_inverted_sooner_with_its_smallest_factors_first);
    tcase_add_test(tests, bad_simulations_are_refused_and_change_nothing);
    suite_add_tcase(suite, tests);
    return run(suite);
}
