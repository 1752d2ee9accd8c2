/* SPDX-License-Identifier: BSD-3-Clause */
/* How long an iteration takes whose weight gradients run at given places, and which k is best. */
#include <math.h>

#include "../sample.h"
#include "by_events.h"
#include "fixture.h"
#include "random_work.h"

enum { MANY = DRAWN(4000) };
static const uint32_t NOW = OF_REORDER_AT_ONCE;

static of_reorder_times times_of(const of_layer_work *layers, size_t n, const uint32_t *places,
                                 of_network network, bool await_first_use) {
    of_reorder_times times;
    OK(of_reorder_simulate(layers, n, places, &network, await_first_use, &times));
    return times;
}

/* Three layers of 1 s a task and 1 byte; a network of 2 s a byte with a message a layer. Further
 * numbers by hand would only say again what by_events() does. */
TEST(an_iteration_is_that_counted_by_hand) {
    of_layer_work three[3];
    const of_network network = {.link.seconds_per_byte = 2};
    for (int i = 0; i < 3; i++)
        three[i] = (of_layer_work){.forward = 1,
                                   .input_gradient = 1,
                                   .weight_gradient = 1,
                                   .weight_bytes = 1,
                                   .has_input_gradient = i > 0};
    static const struct {
        uint32_t places[3];
        bool await_first_use;
        double iteration, exposed;
    } rows[] = {
        /* dX 2, dW 2, dX 1, dW 1, dW 0: complete at 2, 4, 5; messages through at 4, 6, 8. */
        {{OF_REORDER_AT_ONCE, OF_REORDER_AT_ONCE, OF_REORDER_AT_ONCE}, false, 8 + 3, 3},
        /* Layer 0 comes last, and the forward pass begins with it. */
        {{OF_REORDER_AT_ONCE, OF_REORDER_AT_ONCE, OF_REORDER_AT_ONCE}, true, 8 + 3, 3},
        /* dX 2, dX 1, dW 0, dW 1, dW 2: complete at 3, 4, 5; messages through at 5, 7, 9. */
        {{0, 1, 2}, false, 9 + 3, 4},
        /* Forward of layer 0 at 5 to 6, 1 at 7 to 8, 2 at 9 to 10. */
        {{0, 1, 2}, true, 10, 2},
    };
    for (size_t i = 0; i < LENGTH(rows); i++) {
        const of_reorder_times t =
            times_of(three, 3, rows[i].places, network, rows[i].await_first_use);
        ck_assert_msg(t.iteration == rows[i].iteration && t.exposed == rows[i].exposed,
                      "row %zu: %g s, %g s exposed", i, t.iteration, t.exposed);
        ck_assert(t.compute == 8 && t.communication == 6);
    }
}

/* Messages of a backward pass over layers of these MiB, given in the order in which their
 * gradients are complete; DistributedDataParallel's caps. */
static double messages(const double *mib, size_t n) {
    of_layer_work layers[MOST_LAYERS] = {{0}};
    uint32_t places[MOST_LAYERS];
    const of_network network = {
        .link.latency = 1, .bucket_bytes = 25 << 20, .first_bucket_bytes = 1 << 20};
    for (size_t i = 0; i < n; i++) {
        layers[n - 1 - i].weight_bytes = (uint64_t)(mib[i] * (1 << 20));
        places[i] = NOW;
    }
    return times_of(layers, n, places, network, false).communication;
}

TEST(buckets_are_those_of_distributed_data_parallel) {
    static const struct {
        double mib[8];
        size_t n;
        double messages;
    } rows[] = {
        {{0.5}, 1, 1},
        {{0.5, 0.25, 0.125}, 3, 1},
        {{1, 1}, 2, 2},       /* at its cap a bucket closes */
        {{0.5, 30, 1}, 3, 2}, /* whole layers, past its cap */
        {{1, 10, 10, 5, 20, 4}, 6, 3},
        {{1, 10, 10, 5, 20, 5}, 6, 3},
        {{1, 10, 10, 5, 20, 5, 0.5}, 7, 4},
        {{2, 0, 0}, 3, 1}, /* nothing to reduce: no message */
        {{0, 0}, 2, 0},
    };
    for (size_t i = 0; i < LENGTH(rows); i++)
        ck_assert_double_eq(messages(rows[i].mib, rows[i].n), rows[i].messages);
}

static const of_network second_a_byte = {.link.seconds_per_byte = 1};

TEST(with_nothing_to_gain_the_best_k_is_0) {
    of_layer_work layers[MOST_LAYERS];
    const of_network none = {0};
    of_reorder_times best;
    size_t k = 99;
    OK(of_reorder_best_k(layers, random_layers(layers), &none, true, UINT64_MAX, &k, &best));
    ck_assert(k == 0 && best.exposed == 0);
    k = 99;
    OK(of_reorder_best_k(NULL, 0, &none, true, 0, &k, &best));
    ck_assert(k == 0 && best.iteration == 0);
}

/* The gain with two layers, the first of which is 1 s on the network: held, it begins this much
 * earlier. */
static size_t best_k_that_gains(double seconds) {
    const of_layer_work layers[] = {{.weight_bytes = 1000000000},
                                    {.weight_bytes = 1, .weight_gradient = seconds}};
    const of_network network = {.link.seconds_per_byte = 1e-9};
    of_reorder_times best;
    size_t k = 99;
    OK(of_reorder_best_k(layers, 2, &network, false, 0, &k, &best));
    return k;
}

TEST(a_gain_below_a_billionth_is_none) {
    ck_assert_uint_eq(best_k_that_gains(5e-10), 0);
    ck_assert_uint_eq(best_k_that_gains(2e-9), 2);
}

static void check_equal(const of_reorder_times *found, const of_reorder_times *expected,
                        int round) {
    ck_assert_msg(
        found->iteration == expected->iteration && found->compute == expected->compute &&
            found->communication == expected->communication && found->exposed == expected->exposed,
        "input %d: iteration %g, compute %g, communication %g, exposed %g; by events "
        "%g, %g, %g, %g",
        round, found->iteration, found->compute, found->communication, found->exposed,
        expected->iteration, expected->compute, expected->communication, expected->exposed);
}

TEST(iterations_are_those_of_the_simulation_by_events) {
    of_layer_work layers[MOST_LAYERS];
    uint32_t places[MOST_LAYERS];
    int exposed = 0;
    for (int round = 0; round < MANY; round++) {
        const size_t n = random_layers(layers);
        const of_network network = random_network();
        random_places(n, places);
        for (int await = 0; await < 2; await++) {
            const of_reorder_times expected = by_events(layers, n, places, &network, await);
            const of_reorder_times found = times_of(layers, n, places, network, await);
            check_equal(&found, &expected, round);
            exposed += found.exposed > 0;
        }
    }
    ck_assert_int_gt(exposed, MANY / 2);
}

/* All k by events, and their memory. */
static size_t best_by_events(const of_layer_work *layers, size_t n, const of_network *network,
                             bool await_first_use, uint64_t allowed, of_reorder_times *best) {
    size_t best_k = 0;
    for (size_t k = 0; k <= n; k++) {
        uint32_t places[MOST_LAYERS];
        for (size_t i = 0; i < n; i++)
            places[i] = i < k ? (uint32_t)i : NOW;
        const of_reorder_times times = by_events(layers, n, places, network, await_first_use);
        if (k && (times.iteration >= best->iteration ||
                  of_reorder_extra_bytes(layers, n, places) > allowed))
            continue;
        best_k = k;
        *best = times;
    }
    return best_k;
}

TEST(the_best_k_is_the_best_of_all_by_events) {
    of_layer_work layers[MOST_LAYERS];
    int gains = 0;
    for (int round = 0; round < MANY / 2; round++) {
        const size_t n = random_layers(layers);
        const of_network network = random_network();
        const bool await = random_below(2);
        const uint64_t allowed = random_below(3) ? random_below(300) : 0;
        of_reorder_times best, expected;
        size_t k = 99;
        OK(of_reorder_best_k(layers, n, &network, await, allowed, &k, &best));
        ck_assert_uint_eq(k, best_by_events(layers, n, &network, await, allowed, &expected));
        check_equal(&best, &expected, round);
        gains += k > 0;
    }
    ck_assert_int_gt(gains, MANY / 20);
}

/* Layers and a network with times that are no whole numbers. */
static void make_uneven(of_layer_work *layers, size_t n, of_network *network) {
    for (size_t i = 0; i < n; i++) {
        layers[i].forward *= 0.1;
        layers[i].input_gradient *= 0.3;
        layers[i].weight_gradient *= 0.7;
        layers[i].update *= 0.011;
    }
    network->link.latency *= 1e-3;
    network->link.seconds_per_byte *= 0.013;
}

TEST(what_must_hold_for_any_input_does) {
    of_layer_work layers[MOST_LAYERS];
    uint32_t places[MOST_LAYERS];
    int overlapped = 0;
    for (int round = 0; round < MANY; round++) {
        const size_t n = random_layers(layers);
        of_network network = random_network(), none = {0}, slower;
        make_uneven(layers, n, &network);
        random_places(n, places);
        const of_reorder_times all = times_of(layers, n, places, network, false);
        const of_reorder_times used = times_of(layers, n, places, network, true);
        const double rounding = 1e-12 * (1 + all.iteration);
        ck_assert_double_ge(used.exposed, 0);
        ck_assert_double_ge(all.exposed, used.exposed - rounding);
        ck_assert_double_ge(all.iteration, used.iteration - rounding);
        ck_assert_double_ge(used.iteration, used.communication - rounding);
        ck_assert_double_eq_tol(used.iteration, used.compute + used.exposed, rounding);
        ck_assert_double_eq_tol(all.iteration, all.compute + all.exposed, rounding);
        ck_assert_double_eq_tol(all.compute, used.compute, rounding);
        ck_assert_double_eq(times_of(layers, n, places, none, false).exposed, 0);
        slower = network;
        slower.link.latency += 0.5;
        ck_assert_double_ge(times_of(layers, n, places, slower, true).iteration, used.iteration);
        slower = network;
        slower.link.seconds_per_byte *= 1.5;
        ck_assert_double_ge(times_of(layers, n, places, slower, false).iteration, all.iteration);
        overlapped += used.iteration < all.iteration - 0.01;
    }
    ck_assert_int_gt(overlapped, MANY / 20);
}

/* Both functions must refuse it with these words, and write nothing. */
static void refused(const of_layer_work *layers, size_t n, const of_network *network,
                    const char *message) {
    uint32_t places[] = {NOW, 0};
    of_reorder_times times = {.iteration = 77};
    size_t k = 78;
    INVALID(of_reorder_simulate(layers, n, places, network, true, &times), message);
    INVALID(of_reorder_best_k(layers, n, network, true, 9, &k, &times), message);
    ck_assert(times.iteration == 77 && k == 78);
}

TEST(bad_times_are_refused_and_change_nothing) {
    static const double bad[] = {-1, NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < 4; i++) {
        of_layer_work layers[2] = {{.weight_bytes = 1}, {.weight_bytes = 1}};
        double *fields[] = {&layers[1].forward, &layers[1].input_gradient,
                            &layers[1].weight_gradient, &layers[1].update};
        for (size_t f = 0; f < 4; f++) {
            *fields[f] = bad[i];
            refused(layers, 2, &second_a_byte, "layer 1 has times of ");
            *fields[f] = 0;
        }
        refused(layers, 2, &(of_network){.link.latency = bad[i]}, "s a message");
        refused(layers, 2, &(of_network){.link.seconds_per_byte = bad[i]}, "s a byte");
    }
    of_layer_work none[2] = {{.update = 1}};
    refused(none, 2, &second_a_byte, "layer 0 has an update of 1 s and no weight_bytes");
}

TEST(what_is_missing_is_refused) {
    static const of_layer_work layers[3] = {{.weight_bytes = 1}};
    of_reorder_times times;
    size_t k;
    refused(NULL, 2, &second_a_byte, "needs layers, a network and an output");
    refused(layers, 2, NULL, "needs layers, a network and an output");
    refused(layers, UINT32_MAX, &second_a_byte, "more than there are turns");
    refused(layers, SIZE_MAX, &second_a_byte, "more than there are turns");
    const of_network *network = &second_a_byte;
    INVALID(of_reorder_simulate(layers, 3, NULL, network, true, &times), "");
    INVALID(of_reorder_simulate(layers, 3, (uint32_t[]){0, 0, 1}, network, true, &times),
            "are not valid");
    INVALID(of_reorder_simulate(layers, 3, (uint32_t[]){0, 1, 2}, network, true, NULL), "");
    INVALID(of_reorder_best_k(layers, 3, network, true, 0, NULL, &times), "");
    INVALID(of_reorder_best_k(layers, 3, network, true, 0, &k, NULL), "");
    of_layer_work huge[2] = {{.input_bytes = UINT64_MAX}, {0}};
    INVALID(of_reorder_best_k(huge, 2, network, true, 0, &k, &times), "");
}

TEST(bytes_of_any_size_have_a_time) {
    const of_layer_work huge[] = {{.weight_bytes = UINT64_MAX}, {.weight_bytes = UINT64_MAX}};
    const of_network network = {
        .link.seconds_per_byte = 1, .bucket_bytes = UINT64_MAX, .first_bucket_bytes = UINT64_MAX};
    const uint32_t stock[] = {NOW, NOW};
    ck_assert_double_eq(times_of(huge, 2, stock, network, false).iteration, 0x1p65);
    const of_layer_work sum[] = {{.weight_bytes = UINT64_MAX}, {.weight_bytes = 5}};
    ck_assert_double_eq(times_of(sum, 2, stock, network, false).iteration, 0x1p64);
}
