/* SPDX-License-Identifier: BSD-3-Clause */
/* How long an iteration takes whose weight gradients run at given places, and which k is best. */
#include <math.h>
#include <string.h>

#include "../sample.h"
#include "by_events.h"
#include "fixture.h"
#include "random_work.h"

enum { MANY = DRAWN(4000) };
static const uint32_t NOW = OF_REORDER_AT_ONCE;

static of_reorder_times times_of(const of_layer_work *layers, size_t n, const uint32_t *places,
                                 of_network network, bool await_first_use) {
    of_reorder_times times;
    ck_assert_int_eq(of_reorder_simulate(layers, n, places, &network, await_first_use, &times),
                     OF_OK);
    return times;
}

/* Three layers of 1 s a task and 1 byte; a network of 2 s a byte with a message a layer. */
static const of_layer_work three[] = {
    {.forward = 1, .input_gradient = 1, .weight_gradient = 1, .weight_bytes = 1},
    {.forward = 1,
     .input_gradient = 1,
     .weight_gradient = 1,
     .weight_bytes = 1,
     .has_input_gradient = true},
    {.forward = 1,
     .input_gradient = 1,
     .weight_gradient = 1,
     .weight_bytes = 1,
     .has_input_gradient = true},
};
static const of_network two_seconds_a_byte = {.link.seconds_per_byte = 2};

START_TEST(an_iteration_is_that_counted_by_hand) {
    /* dX 2, dW 2, dX 1, dW 1, dW 0: complete at 2, 4, 5; messages through at 4, 6, 8. */
    const uint32_t stock[] = {NOW, NOW, NOW};
    of_reorder_times t = times_of(three, 3, stock, two_seconds_a_byte, false);
    ck_assert_double_eq(t.iteration, 8 + 3);
    ck_assert_double_eq(t.compute, 8);
    ck_assert_double_eq(t.communication, 6);
    ck_assert_double_eq(t.exposed, 3);
    /* Layer 0 comes last, and the forward pass begins with it. */
    t = times_of(three, 3, stock, two_seconds_a_byte, true);
    ck_assert_double_eq(t.iteration, 8 + 3);
    /* dX 2, dX 1, dW 0, dW 1, dW 2: complete at 3, 4, 5; messages through at 5, 7, 9. */
    const uint32_t first[] = {0, 1, 2};
    t = times_of(three, 3, first, two_seconds_a_byte, false);
    ck_assert_double_eq(t.iteration, 9 + 3);
    /* Forward of layer 0 at 5 to 6, 1 at 7 to 8, 2 at 9 to 10. */
    t = times_of(three, 3, first, two_seconds_a_byte, true);
    ck_assert_double_eq(t.iteration, 10);
    ck_assert_double_eq(t.exposed, 2);
}
END_TEST

START_TEST(updates_run_as_their_messages_arrive) {
    of_layer_work layers[3];
    memcpy(layers, three, sizeof layers);
    layers[0].update = layers[1].update = layers[2].update = 1.5;
    /* Messages through at 4, 6, 8: updates from 5 to 6.5 to 8 to 9.5. */
    of_reorder_times t =
        times_of(layers, 3, (uint32_t[]){NOW, NOW, NOW}, two_seconds_a_byte, false);
    ck_assert_double_eq(t.iteration, 9.5 + 3);
    ck_assert_double_eq(t.exposed, 0);
    /* At 5, 7, 9: layer 0 updated by 6.5, used by 7.5; layer 1 by 9 and 10; 2 by 11.5, 12.5. */
    t = times_of(layers, 3, (uint32_t[]){0, 1, 2}, two_seconds_a_byte, true);
    ck_assert_double_eq(t.iteration, 12.5);
    ck_assert_double_eq(t.compute, 12.5);
}
END_TEST

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

START_TEST(buckets_are_those_of_distributed_data_parallel) {
    ck_assert_double_eq(messages((double[]){0.5}, 1), 1);
    ck_assert_double_eq(messages((double[]){0.5, 0.25, 0.125}, 3), 1);
    ck_assert_double_eq(messages((double[]){1, 1}, 2), 2);       /* at its cap a bucket closes */
    ck_assert_double_eq(messages((double[]){0.5, 30, 1}, 3), 2); /* whole layers, past its cap */
    ck_assert_double_eq(messages((double[]){1, 10, 10, 5, 20, 4}, 6), 3);
    ck_assert_double_eq(messages((double[]){1, 10, 10, 5, 20, 5}, 6), 3);
    ck_assert_double_eq(messages((double[]){1, 10, 10, 5, 20, 5, 0.5}, 7), 4);
    ck_assert_double_eq(messages((double[]){2, 0, 0}, 3), 1); /* nothing to reduce: no message */
    ck_assert_double_eq(messages((double[]){0, 0}, 2), 0);
}
END_TEST

/* A layer of 10 bytes that the forward pass begins with, and three of 1 byte whose dW take 2 s;
 * 1 s a byte, a message a layer. */
static const of_layer_work wide_first[] = {
    {.forward = 1, .weight_gradient = 2, .weight_bytes = 10},
    {.forward = 1,
     .input_gradient = 1,
     .weight_gradient = 2,
     .weight_bytes = 1,
     .has_input_gradient = true},
    {.forward = 1,
     .input_gradient = 1,
     .weight_gradient = 2,
     .weight_bytes = 1,
     .has_input_gradient = true},
    {.forward = 1,
     .input_gradient = 1,
     .weight_gradient = 2,
     .weight_bytes = 1,
     .has_input_gradient = true},
};
static const of_network second_a_byte = {.link.seconds_per_byte = 1};

START_TEST(the_best_k_of_a_wide_first_layer_gains_what_was_computed_by_hand) {
    of_reorder_times best;
    size_t k = 99;
    const uint32_t stock[] = {NOW, NOW, NOW, NOW};
    /* Stock: dW 0 is complete at 11 and through at 21, the last; so it is for k = 1. k = 2: from 9
     * to 19, then dW 1: 20. k = 3: from 7 to 17, then two: 19. k = 4: from 5 to 15, then
     * three: 18. */
    ck_assert_double_eq(times_of(wide_first, 4, stock, second_a_byte, false).iteration, 21 + 4);
    ck_assert_int_eq(of_reorder_best_k(wide_first, 4, &second_a_byte, false, 0, &k, &best), OF_OK);
    ck_assert_uint_eq(k, 4);
    ck_assert_double_eq(best.iteration, 18 + 4);
    ck_assert_double_eq(best.exposed, 18 - 11);
    /* Awaited at its first use, layer 0 begins at 15; the others follow by 16, 17, 18. */
    ck_assert_double_eq(times_of(wide_first, 4, stock, second_a_byte, true).iteration, 21 + 4);
    ck_assert_int_eq(of_reorder_best_k(wide_first, 4, &second_a_byte, true, 0, &k, &best), OF_OK);
    ck_assert_uint_eq(k, 4);
    ck_assert_double_eq(best.iteration, 19);
}
END_TEST

START_TEST(the_best_k_is_the_smallest_of_equals_within_its_memory) {
    of_layer_work layers[4];
    of_reorder_times best;
    size_t k = 99;
    memcpy(layers, wide_first, sizeof layers);
    for (size_t i = 0; i < 4; i++)
        layers[i].input_bytes = layers[i].output_bytes = 100;
    /* Stock's peak is dW 3: 4 x, dY, dX and 1 byte of gradients. At dW 0, k = 3 has 3 x, 3 dY and
     * 1 + 10 bytes, k = 4 has 4 x, 4 dY and 10. */
    for (uint64_t allowed = 0; allowed < 300; allowed++) {
        ck_assert_int_eq(of_reorder_best_k(layers, 4, &second_a_byte, false, allowed, &k, &best),
                         OF_OK);
        ck_assert_uint_eq(k, allowed < 10 ? 2 : allowed < 209 ? 3 : 4);
    }
    const of_network none = {0}; /* nothing to gain */
    ck_assert_int_eq(of_reorder_best_k(layers, 4, &none, true, UINT64_MAX, &k, &best), OF_OK);
    ck_assert_uint_eq(k, 0);
    ck_assert_double_eq(best.exposed, 0);
    ck_assert_int_eq(of_reorder_best_k(NULL, 0, &none, true, 0, &k, &best), OF_OK);
    ck_assert(k == 0 && best.iteration == 0);
}
END_TEST

/* The gain with two layers, the first of which is 1 s on the network: held, it begins this much
 * earlier. */
static size_t best_k_that_gains(double seconds) {
    const of_layer_work layers[] = {{.weight_bytes = 1000000000},
                                    {.weight_bytes = 1, .weight_gradient = seconds}};
    const of_network network = {.link.seconds_per_byte = 1e-9};
    of_reorder_times best;
    size_t k = 99;
    ck_assert_int_eq(of_reorder_best_k(layers, 2, &network, false, 0, &k, &best), OF_OK);
    return k;
}

START_TEST(a_gain_below_a_billionth_is_none) {
    ck_assert_uint_eq(best_k_that_gains(5e-10), 0);
    ck_assert_uint_eq(best_k_that_gains(2e-9), 2);
}
END_TEST

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

START_TEST(iterations_are_those_of_the_simulation_by_events) {
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
END_TEST

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

START_TEST(the_best_k_is_the_best_of_all_by_events) {
    of_layer_work layers[MOST_LAYERS];
    int gains = 0;
    for (int round = 0; round < MANY / 2; round++) {
        const size_t n = random_layers(layers);
        const of_network network = random_network();
        const bool await = random_below(2);
        const uint64_t allowed = random_below(3) ? random_below(300) : 0;
        of_reorder_times best, expected;
        size_t k = 99;
        ck_assert_int_eq(of_reorder_best_k(layers, n, &network, await, allowed, &k, &best), OF_OK);
        ck_assert_uint_eq(k, best_by_events(layers, n, &network, await, allowed, &expected));
        check_equal(&best, &expected, round);
        gains += k > 0;
    }
    ck_assert_int_gt(gains, MANY / 20);
}
END_TEST

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

START_TEST(what_must_hold_for_any_input_does) {
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
END_TEST

START_TEST(more_memory_never_makes_the_best_k_slower) {
    of_layer_work layers[MOST_LAYERS];
    for (int round = 0; round < MANY / 4; round++) {
        const size_t n = random_layers(layers);
        const of_network network = random_network();
        of_reorder_times before, after;
        size_t k;
        of_reorder_best_k(layers, n, &network, true, 0, &k, &before);
        for (uint64_t allowed = 50; allowed < 400; allowed += 50) {
            of_reorder_best_k(layers, n, &network, true, allowed, &k, &after);
            ck_assert_double_le(after.iteration, before.iteration);
            before = after;
        }
    }
}
END_TEST

/* Both functions must refuse it with these words, and write nothing. */
static void refused(const of_layer_work *layers, size_t n, const of_network *network,
                    const char *message) {
    uint32_t places[] = {NOW, 0};
    of_reorder_times times = {.iteration = 77};
    size_t k = 78;
    ck_assert_int_eq(of_reorder_simulate(layers, n, places, network, true, &times), OF_INVALID);
    ck_assert_msg(strstr(of_error_message(), message), "%s", of_error_message());
    ck_assert_int_eq(of_reorder_best_k(layers, n, network, true, 9, &k, &times), OF_INVALID);
    ck_assert_msg(strstr(of_error_message(), message), "%s", of_error_message());
    ck_assert(times.iteration == 77 && k == 78);
}

START_TEST(bad_times_are_refused_and_change_nothing) {
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
END_TEST

START_TEST(what_is_missing_is_refused) {
    of_reorder_times times;
    size_t k;
    refused(NULL, 2, &second_a_byte, "needs layers, a network and an output");
    refused(three, 2, NULL, "needs layers, a network and an output");
    refused(three, UINT32_MAX, &second_a_byte, "more than there are turns");
    refused(three, SIZE_MAX, &second_a_byte, "more than there are turns");
    const of_network *network = &second_a_byte;
    ck_assert_int_eq(of_reorder_simulate(three, 3, NULL, network, true, &times), OF_INVALID);
    ck_assert_int_eq(of_reorder_simulate(three, 3, (uint32_t[]){0, 0, 1}, network, true, &times),
                     OF_INVALID);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "are not valid"));
    ck_assert_int_eq(of_reorder_simulate(three, 3, (uint32_t[]){0, 1, 2}, network, true, NULL),
                     OF_INVALID);
    ck_assert_int_eq(of_reorder_best_k(three, 3, network, true, 0, NULL, &times), OF_INVALID);
    ck_assert_int_eq(of_reorder_best_k(three, 3, network, true, 0, &k, NULL), OF_INVALID);
    of_layer_work huge[2] = {{.input_bytes = UINT64_MAX}, {0}};
    ck_assert_int_eq(of_reorder_best_k(huge, 2, network, true, 0, &k, &times), OF_INVALID);
}
END_TEST

START_TEST(bytes_of_any_size_have_a_time) {
    const of_layer_work huge[] = {{.weight_bytes = UINT64_MAX}, {.weight_bytes = UINT64_MAX}};
    const of_network network = {
        .link.seconds_per_byte = 1, .bucket_bytes = UINT64_MAX, .first_bucket_bytes = UINT64_MAX};
    const uint32_t stock[] = {NOW, NOW};
    ck_assert_double_eq(times_of(huge, 2, stock, network, false).iteration, 0x1p65);
    const of_layer_work sum[] = {{.weight_bytes = UINT64_MAX}, {.weight_bytes = 5}};
    ck_assert_double_eq(times_of(sum, 2, stock, network, false).iteration, 0x1p64);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("reorder simulate");
    TCase *tests = tcase_create("reorder simulate");
    tcase_add_test(tests, an_iteration_is_that_counted_by_hand);
    tcase_add_test(tests, updates_run_as_their_messages_arrive);
    tcase_add_test(tests, buckets_are_those_of_distributed_data_parallel);
    tcase_add_test(tests, the_best_k_of_a_wide_first_layer_gains_what_was_computed_by_hand);
    tcase_add_test(tests, the_best_k_is_the_smallest_of_equals_within_its_memory);
    tcase_add_test(tests, a_gain_below_a_billionth_is_none);
    tcase_add_test(tests, iterations_are_those_of_the_simulation_by_events);
    tcase_add_test(tests, the_best_k_is_the_best_of_all_by_events);
    tcase_add_test(tests, what_must_hold_for_any_input_does);
    tcase_add_test(tests, more_memory_never_makes_the_best_k_slower);
    tcase_add_test(tests, bad_times_are_refused_and_change_nothing);
    tcase_add_test(tests, what_is_missing_is_refused);
    tcase_add_test(tests, bytes_of_any_size_have_a_time);
    suite_add_tcase(suite, tests);
    return run(suite);
}
