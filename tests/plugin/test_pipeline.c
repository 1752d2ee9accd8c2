/* SPDX-License-Identifier: BSD-3-Clause */
/* Placements and delays of layer pipelines: the cut, stages, tasks of layers, slots. */
#include <math.h>
#include <stdio.h>

#include "planners/pipeline/cut.h"
#include "random_pipeline.h"

enum { CUTS = 2000, PLANS = 1000 };

/* By trying every cut. */
static double least_cut(const double *costs, size_t n, size_t parts) {
    double best = INFINITY, first = 0;
    if (parts == 1 || n <= 1) {
        for (size_t i = 0; i < n; i++)
            first += costs[i];
        return first;
    }
    for (size_t to = 1; to <= n; to++) {
        first += costs[to - 1];
        best = fmin(best, fmax(first, least_cut(costs + to, n - to, parts - 1)));
    }
    return best;
}

static double sum_of(const void *costs, size_t from, size_t to, size_t r) {
    double sum = 0;
    for (size_t i = from; i < to; i++)
        sum += ((const double *)costs)[i];
    return sum / (double)r;
}

TEST(the_cut_is_the_best_of_all) {
    for (int k = 0; k < CUTS; k++) {
        double costs[10], largest, most = 0;
        const size_t n = random_below(11), parts = 1 + random_below(6);
        of_stage stages[7] = {[6] = {.from = 99}};
        size_t n_stages = 77, next = 0;
        for (size_t i = 0; i < n; i++)
            costs[i] = (double)random_below(30);
        const of_stage_loads loads = {.load = sum_of, .of = costs, .n = n, .most_replicas = 1};
        OK(of_cut_stages(&loads, parts, stages, &n_stages, &largest));
        ck_assert_double_eq(largest, least_cut(costs, n, parts));
        ck_assert(n_stages <= parts && stages[6].from == 99);
        for (size_t s = 0; s < n_stages; s++) {
            ck_assert(stages[s].from == next && stages[s].to > next && stages[s].process == s);
            next = stages[s].to;
            most = fmax(most, sum_of(costs, stages[s].from, next, 1));
        }
        ck_assert(next == n);
        ck_assert_double_eq(most, largest);
    }
}

/* The seconds a batch of each process, by the places alone. */
static double largest_load(void) {
    double load[MOST_STAGES] = {0}, most = 0;
    bool trained = false;
    for (size_t i = 0; i < d.p.n; i++) {
        const of_pipeline_layer *l = &d.layers[i];
        const of_pipeline_place *at = &d.places[i];
        const double dx = trained ? l->input_gradient : 0;
        const double first = at->split ? dx * at->split / l->channels : dx;
        for (int32_t r = 0; r < at->replicas; r++) {
            load[at->forward + r] += l->forward / at->replicas;
            load[at->input_gradient + r] += first / at->replicas;
            if (l->weight_bytes) {
                load[at->forward + r] += l->update / at->replicas;
                load[at->weight_gradient + r] += l->weight_gradient / at->replicas;
            }
            if (at->replicas > 1 && l->weight_bytes)
                load[at->forward + r] += 2 * (at->replicas - 1) *
                                         (d.link.latency + (double)l->weight_bytes / at->replicas *
                                                               d.link.seconds_per_byte) /
                                         at->replicas;
        }
        if (at->split)
            load[at->second_input_gradient] += dx - first;
        trained = trained || l->weight_bytes;
    }
    for (size_t q = 0; q < d.p.processes; q++)
        most = fmax(most, load[q]);
    return most;
}

static double place_by(of_strategy strategy) {
    double largest;
    d.p.strategy = strategy;
    OK(of_pipeline_place_layers(&d.p, &d.link, d.places, &largest));
    OK(of_pipeline_check(&d.p));
    ck_assert_double_eq_tol(largest, largest_load(), 1e-9 * (largest + 1));
    return largest;
}

TEST(placements_have_the_loads_they_say_and_more_freedom_is_no_worse) {
    int split = 0, moved = 0, replicated = 0;
    for (int k = 0; k < PLANS; k++) {
        draw(0);
        set_strategy(OF_PIPELINE_1F1B);
        const double stages = place_by(OF_PIPELINE_1F1B);
        ck_assert_double_eq(place_by(OF_PIPELINE_GPIPE), stages);
        ck_assert_double_le(place_by(OF_PIPELINE_REPLICATED), stages * (1 + 1e-12));
        for (size_t i = 0; i < d.p.n; i++)
            replicated += d.places[i].replicas > 1;
        ck_assert_double_eq(place_by(OF_PIPELINE_1F1B_FLUSH), stages);
        ck_assert_double_eq(place_by(OF_PIPELINE_FAST_FORWARD), stages);
        const double apart = place_by(OF_PIPELINE_INTRA);
        ck_assert_double_le(apart, stages);
        for (size_t i = 0; i < d.p.n; i++) {
            moved += d.places[i].weight_gradient != d.places[i].forward;
            ck_assert_uint_eq(d.places[i].split, 0);
        }
        ck_assert_double_le(place_by(OF_PIPELINE_LAYERPIPE), apart);
        for (size_t i = 0; i < d.p.n; i++)
            split += d.places[i].split > 0;
    }
    ck_assert_msg(split > 100 && moved > 100 && replicated > 100, "%d split, %d moved, %d shared",
                  split, moved, replicated);
}

TEST(modulo_deals_layers_in_turns) {
    for (int k = 0; k < PLANS; k++) {
        draw(0);
        set_strategy(OF_PIPELINE_MODULO);
        place_by(OF_PIPELINE_MODULO);
        for (size_t i = 0; i < d.p.n; i++)
            ck_assert_int_eq(d.places[i].forward, (int)(i / d.p.chunk % d.p.processes));
    }
}

/* All stages with all replicas, one process less at a time. */
static double least_replicated(size_t from, size_t processes) {
    double best = INFINITY;
    if (from == d.p.n)
        return 0;
    for (size_t to = from + 1; to <= d.p.n; to++)
        for (size_t r = 1; r <= processes; r++) {
            double load = 0;
            for (size_t i = from; i < to; i++) {
                const of_pipeline_layer *l = &d.layers[i];
                load += l->forward + l->update + l->weight_gradient + (i ? l->input_gradient : 0) +
                        2 * ((double)r - 1) *
                            (d.link.latency +
                             (double)l->weight_bytes / (double)r * d.link.seconds_per_byte);
            }
            best = fmin(best, fmax(load / (double)r, least_replicated(to, processes - r)));
        }
    return best;
}

TEST(replicated_stages_are_the_best_of_all) {
    for (int k = 0; k < 200; k++) {
        fresh();
        d.p.strategy = OF_PIPELINE_REPLICATED;
        d.p.n = 1 + random_below(6);
        d.p.processes = 1 + random_below(5);
        d.link = (of_network_link){(double)random_below(3), (double)random_below(2) / 8};
        for (size_t i = 0; i < d.p.n; i++) {
            d.layers[i] = random_pipeline_layer(0);
            d.layers[i].weight_bytes += 1;
        }
        const double best = least_replicated(0, d.p.processes);
        ck_assert_double_le(fabs(place_by(OF_PIPELINE_REPLICATED) - best), 1e-9 * best);
    }
}

/* n layers of one second a task, layer i on process on[i]. */
static void on_processes(of_strategy strategy, size_t n, const int32_t *on) {
    fresh();
    d.p.strategy = strategy;
    d.p.chunk = strategy == OF_PIPELINE_MODULO;
    d.p.n = n;
    d.p.processes = MOST_STAGES;
    for (size_t i = 0; i < n; i++) {
        d.layers[i] = (of_pipeline_layer){1, 1, 1, 1, 4, 4, 4, 64, true};
        d.places[i] = (of_pipeline_place){on[i], on[i], on[i], OF_NO_PROCESS, 0, 1};
    }
}

static void check_delays(const uint32_t *expected) {
    uint32_t delays[MOST_LAYERS];
    OK(of_pipeline_delays(&d.p, delays));
    for (size_t i = 0; i < d.p.n; i++)
        ck_assert_msg(delays[i] == expected[i], "layer %zu: D = %u instead of %u", i, delays[i],
                      expected[i]);
}

TEST(delays_are_the_stages_after_or_twice_as_many_in_slots) {
    static const int32_t on[] = {0, 0, 1, 2, 2, 3};
    on_processes(OF_PIPELINE_1F1B, 6, on);
    check_delays((uint32_t[]){3, 3, 2, 1, 1, 0});
    for (int s = 0; s < OF_PIPELINE_STRATEGIES; s++) {
        on_processes((of_strategy)s, 6, on);
        if (s == OF_PIPELINE_GPIPE || s >= OF_PIPELINE_1F1B_FLUSH)
            check_delays((uint32_t[]){0, 0, 0, 0, 0, 0});
    }
    on_processes(OF_PIPELINE_INTRA, 6, on);
    check_delays((uint32_t[]){6, 6, 4, 2, 2, 0});
    d.places[5].weight_gradient = 4; /* there and back */
    check_delays((uint32_t[]){6, 6, 4, 2, 2, 2});
    d.places[5].weight_gradient = 3;
    d.places[4].weight_gradient = 3; /* where the gradient of its output is */
    check_delays((uint32_t[]){6, 6, 4, 2, 2, 0});
    d.p.strategy = OF_PIPELINE_LAYERPIPE;
    d.places[2].split = 16; /* the second part is a slot later than the first, and so is layer 1 */
    d.places[2].second_input_gradient = 0;
    check_delays((uint32_t[]){6, 6, 4, 2, 2, 0});
    d.places[2].second_input_gradient = 4;
    check_delays((uint32_t[]){6, 6, 4, 2, 2, 0});
}

TEST(replicas_have_fewer_batches_under_way) {
    static const int32_t on[] = {0, 0, 3, 5};
    on_processes(OF_PIPELINE_REPLICATED, 4, on);
    d.places[0].replicas = d.places[1].replicas = 3;
    d.places[2].replicas = 2;
    check_delays((uint32_t[]){1, 1, 1, 0}); /* ceil(6 / 3) - 1, ceil(3 / 2) - 1, 0 */
    ck_assert_uint_eq(of_pipeline_group(&d.p, 1), 3);
    ck_assert_uint_eq(of_pipeline_group(&d.p, 2), 2);
}

TEST(bad_pipelines_are_refused) {
    on_processes(OF_PIPELINE_LAYERPIPE, 3, (int32_t[]){0, 1, 2});
    const drawn good = d;
    uint32_t delays[MOST_LAYERS] = {77};
#define REFUSED(change, why)                                                                       \
    do {                                                                                           \
        d = good;                                                                                  \
        change;                                                                                    \
        INVALID(of_pipeline_check(&d.p), why);                                                     \
        INVALID(of_pipeline_delays(&d.p, delays), why);                                            \
        INVALID(of_pipeline_schedule(&d.p, &d.link, 1, d.tasks), why);                             \
        ck_assert_uint_eq(delays[0], 77);                                                          \
    } while (0)
    REFUSED(d.p.n = 0, "needs 1 to");
    REFUSED(d.p.layers = NULL, "needs 1 to");
    REFUSED(d.p.places = NULL, "needs a place");
    REFUSED(d.p.strategy = (of_strategy)-1, "there is no strategy");
    REFUSED(d.p.strategy = (of_strategy)8, "there is no strategy 8");
    REFUSED(d.p.processes = 0, "can't run on 0 processes");
    REFUSED(d.p.processes = SIZE_MAX, "can't run on");
    REFUSED(d.p.micro_batches = 0, "0 micro-batches");
    REFUSED(d.p.micro_batches = 2, "2 micro-batches");
    REFUSED(d.p.in_flight = 1, "at most 1 batches in flight");
    REFUSED((d.p.strategy = OF_PIPELINE_1F1B_FLUSH, d.p.in_flight = 2), "at most 2 batches");
    REFUSED(d.p.chunk = 2, "2 layers a turn");
    REFUSED((d.p.strategy = OF_PIPELINE_FAST_FORWARD, d.p.chunk = 1), "1 layers a turn");
    REFUSED(d.p.strategy = OF_PIPELINE_MODULO, "0 layers a turn");
    REFUSED((d.p.strategy = OF_PIPELINE_MODULO, d.p.chunk = 1, d.places[1].weight_gradient = 2),
            "place it whole");
    REFUSED((d.p.strategy = OF_PIPELINE_FAST_FORWARD, d.places[2] = d.places[0]), "contiguous");
    REFUSED(d.layers[1].forward = -1, "layer 1 of a pipeline takes -1");
    REFUSED(d.layers[1].input_gradient = NAN, "layer 1 of a pipeline takes");
    REFUSED(d.layers[1].weight_gradient = INFINITY, "layer 1 of a pipeline takes");
    REFUSED(d.layers[1].update = -0.5, "layer 1 of a pipeline takes");
    REFUSED(d.layers[1].weight_bytes = 0, "layer 1 of a pipeline is movable");
    REFUSED(d.layers[1].channels = 0, "layer 1 of a pipeline is movable");
    REFUSED(d.places[1].forward = -1, "is none of");
    REFUSED(d.places[1].forward = MOST_STAGES, "is none of");
    REFUSED(d.places[1].weight_gradient = INT32_MAX, "is none of");
    REFUSED(d.places[1].input_gradient = INT32_MIN, "is none of");
    REFUSED(d.places[1].second_input_gradient = -2, "is none of");
    REFUSED(d.places[1].replicas = 0, "is none of");
    REFUSED(d.places[1].replicas = 2, "replicas");
    REFUSED(d.places[1].split = 16, "split at 16 of 64 channels");
    REFUSED(d.places[1].second_input_gradient = 3, "split at 0 of 64 channels");
    REFUSED((d.places[1].second_input_gradient = 3, d.places[1].split = 8), "split at 8");
    REFUSED((d.places[1].second_input_gradient = 3, d.places[1].split = 64), "split at 64");
    REFUSED((d.places[1].second_input_gradient = 1, d.places[1].split = 16), "processes 1 and 1");
    REFUSED(d.places[0].input_gradient = 1, "has no input gradient");
    REFUSED((d.layers[1].movable = false, d.places[1].weight_gradient = 2), "place it whole");
    REFUSED((d.p.strategy = OF_PIPELINE_1F1B, d.places[1].weight_gradient = 2), "place it whole");
    REFUSED((d.p.strategy = OF_PIPELINE_1F1B, d.places[2] = d.places[0]), "stages are contiguous");
    REFUSED((d.p.strategy = OF_PIPELINE_REPLICATED, d.places[0].replicas = 2),
            "stages are contiguous");
    REFUSED((d.p.strategy = OF_PIPELINE_REPLICATED, d.places[0].replicas = INT32_MAX), "replicas");
    INVALID(of_pipeline_check(NULL), "");
}

TEST(bad_placements_are_refused_and_change_nothing) {
    of_pipeline_place places[3] = {{.forward = 7}};
    on_processes(OF_PIPELINE_LAYERPIPE, 3, (int32_t[]){0, 1, 2});
    double largest = 77;
    INVALID(of_pipeline_place_layers(NULL, &d.link, places, &largest), "");
    INVALID(of_pipeline_place_layers(&d.p, NULL, places, &largest), "");
    INVALID(of_pipeline_place_layers(&d.p, &d.link, NULL, &largest), "");
    d.link.latency = -1;
    INVALID(of_pipeline_place_layers(&d.p, &d.link, places, &largest), "");
    d.link.latency = 0;
    d.layers[0].forward = d.layers[1].forward = 1e308;
    INVALID(of_pipeline_place_layers(&d.p, &d.link, places, &largest), "out of range");
    ck_assert(places[0].forward == 7 && largest == 77);
}

/* The tasks of one process, as F3.0 X3.0: the letter of the kind, the layer and the batch. */
static const char *tasks_of(int32_t process) {
    static char text[400];
    size_t at = 0;
    text[0] = 0;
    for (size_t k = 0; k < d.n; k++)
        if (d.tasks[k].process == process)
            at += (size_t)snprintf(text + at, sizeof text - at, "%s%c%d.%d", at ? " " : "",
                                   "FXYWU"[d.tasks[k].kind], d.tasks[k].layer, d.tasks[k].batch);
    return text;
}

static void split_gradients(void) { /* F0 slot 0, F1 and X1 1, Y1 and W1 2, U1 and W0 3 */
    d.places[1].weight_gradient = d.places[1].second_input_gradient = 2;
    d.places[1].split = 16;
}

static void two_replicas(void) {
    d.places[0].replicas = 2;
}

/* clang-format off */
/* One second a task. Fast forward takes dX, then F, then dW, which wait, but where no other batch
 * may begin. Groups of which the last is not complete. */
static const struct {
    of_strategy strategy;
    size_t layers;
    int32_t on[4];
    size_t batches, micro_batches, in_flight;
    void (*change)(void);
    const char *tasks[4]; /* by process; NULL: not looked at */
} papers[] = {
    {OF_PIPELINE_1F1B, 3, {0, 1, 2}, 4, 1, 0, NULL,
     {"F0.0 F0.1 F0.2 W0.0 U0.0 F0.3 W0.1 U0.1 W0.2 U0.2 W0.3 U0.3", NULL,
      "F2.0 X2.0 W2.0 U2.0 F2.1 X2.1 W2.1 U2.1 F2.2 X2.2 W2.2 U2.2 F2.3 X2.3 W2.3 U2.3", ""}},
    {OF_PIPELINE_GPIPE, 3, {0, 1, 2}, 3, 2, 0, NULL,
     {NULL, "F1.0 F1.1 X1.0 W1.0 X1.1 W1.1 U1.1 F1.2 X1.2 W1.2 U1.2"}},
    {OF_PIPELINE_LAYERPIPE, 2, {0, 1}, 3, 1, 0, split_gradients,
     {"F0.0 F0.1 F0.2 W0.0 U0.0 W0.1 U0.1 W0.2 U0.2",
      "F1.0 X1.0 F1.1 X1.1 F1.2 X1.2 U1.0 U1.1 U1.2", "Y1.0 W1.0 Y1.1 W1.1 Y1.2 W1.2"}},
    {OF_PIPELINE_REPLICATED, 2, {0, 2}, 4, 1, 0, two_replicas,
     {"F0.0 F0.2 W0.0 U0.0 W0.2 U0.2", "F0.1 F0.3 W0.1 U0.1 W0.3 U0.3"}},
    {OF_PIPELINE_1F1B_FLUSH, 3, {0, 1, 2}, 4, 3, 0, NULL,
     {"F0.0 F0.1 F0.2 W0.0 W0.1 W0.2 U0.2 F0.3 W0.3 U0.3", NULL,
      "F2.0 X2.0 W2.0 F2.1 X2.1 W2.1 F2.2 X2.2 W2.2 U2.2 F2.3 X2.3 W2.3 U2.3"}},
    {OF_PIPELINE_FAST_FORWARD, 3, {0, 1, 2}, 4, 4, 0, NULL,
     {"F0.0 F0.1 F0.2 F0.3 W0.0 W0.1 W0.2 W0.3 U0.3",
      "F1.0 F1.1 F1.2 X1.0 F1.3 X1.1 W1.0 X1.2 W1.1 X1.3 W1.2 W1.3 U1.3",
      "F2.0 X2.0 F2.1 X2.1 F2.2 X2.2 F2.3 X2.3 W2.0 W2.1 W2.2 W2.3 U2.3"}},
    {OF_PIPELINE_FAST_FORWARD, 3, {0, 1, 2}, 4, 4, 2, NULL,
     {NULL, NULL, "F2.0 X2.0 F2.1 X2.1 W2.0 W2.1 F2.2 X2.2 F2.3 X2.3 W2.2 W2.3 U2.3"}},
    {OF_PIPELINE_MODULO, 4, {0, 1, 0, 1}, 2, 2, 0, NULL,
     {"F0.0 F0.1 F2.0 F2.1 X2.0 W2.0 W0.0 X2.1 W2.1 U2.1 W0.1 U0.1"}},
};
/* clang-format on */

TESTS(schedules_are_those_of_their_papers, LENGTH(papers)) {
    on_processes(papers[row].strategy, papers[row].layers, papers[row].on);
    d.batches = papers[row].batches;
    d.p.micro_batches = papers[row].micro_batches;
    d.p.in_flight = papers[row].in_flight;
    if (papers[row].change)
        papers[row].change();
    schedule();
    for (int32_t process = 0; process < 4; process++)
        if (papers[row].tasks[process])
            ck_assert_str_eq(tasks_of(process), papers[row].tasks[process]);
}

TEST(schedules_need_batches_and_room) {
    of_pipeline_task task;
    on_processes(OF_PIPELINE_1F1B, 2, (int32_t[]){0, 1});
    INVALID(of_pipeline_schedule(&d.p, &d.link, 0, &task), "");
    INVALID(of_pipeline_schedule(&d.p, &d.link, SIZE_MAX, &task), "");
    INVALID(of_pipeline_schedule(&d.p, &d.link, 1, NULL), "");
    INVALID(of_pipeline_schedule(&d.p, NULL, 1, &task), "");
    INVALID(of_pipeline_delays(&d.p, NULL), "");
}
