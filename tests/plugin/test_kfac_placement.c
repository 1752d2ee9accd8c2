/* SPDX-License-Identifier: BSD-3-Clause */
/* The process that inverts each factor. */
#include <math.h>

#include "fixture.h"
#include "planners/kfac/messages.h"
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

/* The largest load over the mean, to four decimals. */
static double imbalance(of_placement how, const factors *f, size_t processes) {
    int32_t owner[RESNET_FACTORS];
    double load[16], sum = 0, most = 0;
    OK(of_place_inverses(how, f->sizes, f->n, processes, 0, owner, load));
    for (size_t p = 0; p < processes; p++) {
        sum += load[p];
        most = fmax(most, load[p]);
    }
    return round(1e4 * most * (double)processes / sum) / 1e4;
}

TEST(resnet_50_is_balanced_as_well_as_it_was_elsewhere) {
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

typedef struct work {
    uint32_t sizes[MOST];
    size_t n, processes;
} work;

static work random_factors(void) {
    work w = {.n = random_below(MOST + 1), .processes = 1 + random_below(PROCESSES)};
    for (size_t i = 0; i < w.n; i++)
        w.sizes[i] = (uint32_t)random_below(9);
    return w;
}

/* The factor before which so many come: the largest first. */
static size_t at_rank(const work *w, size_t rank) {
    for (size_t i = 0;; i++) {
        size_t before = 0;
        for (size_t j = 0; j < w->n; j++)
            before += w->sizes[j] > w->sizes[i] || (w->sizes[j] == w->sizes[i] && j < i);
        if (before == rank)
            return i;
    }
}

static double cube(uint32_t size) {
    return pow(size, 3);
}

/* In turn by their places, or the largest first, each to the least loaded; small ones to all. */
TEST(owners_are_those_of_the_definition) {
    size_t small = 0;
    for (int round = 0; round < 3 * MANY; round++) {
        const work w = random_factors();
        const of_placement how = (of_placement)(round % 3);
        const uint32_t below = (uint32_t)random_below(6);
        int32_t owner[MOST + 1] = {[MOST] = 77}, again[MOST];
        double load[PROCESSES] = {0}, reported[PROCESSES + 1], everywhere = 0;
        size_t turn = 0;
        owner[w.n] = 77;
        reported[w.processes] = 78;
        OK(of_place_inverses(how, w.sizes, w.n, w.processes, below, owner, reported));
        for (size_t rank = 0; rank < w.n; rank++) {
            const size_t i = how == OF_PLACEMENT_BALANCED ? at_rank(&w, rank) : rank;
            if (how == OF_PLACEMENT_EVERYWHERE || w.sizes[i] < below) {
                ck_assert_int_eq(owner[i], OF_EVERY_PROCESS);
                everywhere += cube(w.sizes[i]);
                small++;
                continue;
            }
            for (size_t p = 0; p < w.processes && how == OF_PLACEMENT_BALANCED; p++) {
                const bool lower = p < (size_t)owner[i];
                ck_assert(lower ? load[p] > load[owner[i]] : load[p] >= load[owner[i]]);
            }
            if (how == OF_PLACEMENT_ROUND_ROBIN)
                ck_assert_int_eq(owner[i], (int32_t)(turn++ % w.processes));
            load[owner[i]] += cube(w.sizes[i]);
        }
        for (size_t p = 0; p < w.processes; p++)
            ck_assert_double_eq(reported[p], load[p] + everywhere);
        ck_assert(owner[w.n] == 77 && reported[w.processes] == 78);
        OK(of_place_inverses(how, w.sizes, w.n, w.processes, below, again, NULL));
        ck_assert_mem_eq(again, owner, w.n * sizeof *again);
    }
    ck_assert_uint_gt(small, MANY);
}

TEST(bad_placements_are_refused_and_change_nothing) {
    static const uint32_t two[] = {1, 2};
    int32_t owners[] = {71, 72}, *owner;
    double load[] = {73, 74};
    const uint32_t *sizes;
    size_t n, processes;
    of_placement how;
#define REFUSED(change, words)                                                                     \
    do {                                                                                           \
        how = OF_PLACEMENT_BALANCED;                                                               \
        n = processes = 2;                                                                         \
        sizes = two;                                                                           \
        owner = owners;                                                                            \
        change;                                                                                    \
        INVALID(of_place_inverses(how, sizes, n, processes, 0, owner, load), words);               \
    } while (0)
    REFUSED(processes = 0, "on 0 processes");
    REFUSED(processes = (size_t)INT32_MAX + 1, "processes");
    REFUSED(n = SIZE_MAX, "more than can be placed");
    REFUSED(how = (of_placement)3, "no placement 3");
    REFUSED(how = (of_placement)-1, "no placement -1");
    REFUSED(sizes = NULL, "");
    REFUSED(owner = NULL, "");
    ck_assert(owners[0] == 71 && owners[1] == 72 && load[0] == 73 && load[1] == 74);
    OK(of_place_inverses(OF_PLACEMENT_BALANCED, NULL, 0, 2, 0, NULL, load));
    ck_assert(load[0] == 0 && load[1] == 0);
}
