/* SPDX-License-Identifier: BSD-3-Clause */
/* Where weight gradients run in a backward pass, and what that takes in memory. */
#include <string.h>

#include "fixture.h"
#include "planners/reorder/reorder.h"
#include "random_work.h"

enum { MANY = 4000 };
static const uint32_t NOW = OF_REORDER_AT_ONCE;

/* The places of n layers must be these, and nothing behind them be written. */
static void check_places(of_reorder_choice choice, const of_layer_work *layers, size_t n,
                         const uint32_t *expected) {
    uint32_t places[MOST_LAYERS + 1];
    places[n] = 71;
    ck_assert_int_eq(of_reorder_places(&choice, layers, n, places), OF_OK);
    for (size_t i = 0; i < n; i++)
        ck_assert_msg(places[i] == expected[i], "schedule %d, layer %zu: %u instead of %u",
                      (int)choice.schedule, i, places[i], expected[i]);
    ck_assert_uint_eq(places[n], 71);
}

START_TEST(each_schedule_has_the_places_of_its_definition) {
    static const bool chosen[] = {false, true, false, true, true};
    check_places((of_reorder_choice){.schedule = OF_REORDER_STOCK}, NULL, 5,
                 (uint32_t[]){NOW, NOW, NOW, NOW, NOW});
    check_places((of_reorder_choice){.schedule = OF_REORDER_LAST}, NULL, 5,
                 (uint32_t[]){4, 3, 2, 1, 0});
    check_places((of_reorder_choice){.schedule = OF_REORDER_REVERSE_FIRST, .k = 3}, NULL, 5,
                 (uint32_t[]){0, 1, 2, NOW, NOW});
    check_places((of_reorder_choice){.schedule = OF_REORDER_REVERSE_FIRST, .k = 5}, NULL, 5,
                 (uint32_t[]){0, 1, 2, 3, 4});
    check_places((of_reorder_choice){.schedule = OF_REORDER_REVERSE_FIRST, .k = 0}, NULL, 2,
                 (uint32_t[]){NOW, NOW});
    check_places((of_reorder_choice){.schedule = OF_REORDER_CHOSEN, .held = chosen}, NULL, 5,
                 (uint32_t[]){NOW, 0, NOW, 1, 2});
}
END_TEST

START_TEST(a_budget_holds_what_fits_from_the_last_layer_on) {
    static const of_layer_work layers[] = {
        {.input_bytes = 1, .output_bytes = 2},
        {.input_bytes = 4, .output_bytes = 4},
        {.input_bytes = 5, .output_bytes = 6},
        {.input_bytes = 3, .output_bytes = 2},
    };
    of_reorder_choice choice = {.schedule = OF_REORDER_BUDGET, .budget_bytes = 16};
    check_places(choice, layers, 4, (uint32_t[]){NOW, NOW, 1, 0});
    choice.budget_bytes = 15; /* one too few for layers 3 and 2 together */
    check_places(choice, layers, 4, (uint32_t[]){NOW, 1, NOW, 0});
    choice.budget_bytes = 8;
    check_places(choice, layers, 4, (uint32_t[]){1, NOW, NOW, 0});
    choice.budget_bytes = 2;
    check_places(choice, layers, 4, (uint32_t[]){NOW, NOW, NOW, NOW});
    choice.budget_bytes = UINT64_MAX;
    check_places(choice, layers, 4, (uint32_t[]){3, 2, 1, 0});
}
END_TEST

START_TEST(a_budget_is_never_exceeded_and_no_layer_that_fits_is_left_out) {
    of_layer_work layers[MOST_LAYERS];
    uint32_t places[MOST_LAYERS];
    for (int round = 0; round < MANY; round++) {
        const size_t n = random_layers(layers);
        const uint64_t budget = random_below(600);
        const of_reorder_choice choice = {.schedule = OF_REORDER_BUDGET, .budget_bytes = budget};
        ck_assert_int_eq(of_reorder_places(&choice, layers, n, places), OF_OK);
        uint64_t held = 0;
        uint32_t turn = 0;
        for (size_t i = n; i-- > 0;) {
            const uint64_t own = layers[i].input_bytes + layers[i].output_bytes;
            ck_assert_uint_eq(places[i], held + own <= budget ? turn++ : NOW);
            held += places[i] == NOW ? 0 : own;
        }
        ck_assert_uint_le(held, budget);
    }
}
END_TEST

START_TEST(a_budget_of_any_size_meets_layers_of_any_size) {
    static const of_layer_work layers[] = {
        {.input_bytes = 1, .output_bytes = 1},
        {.input_bytes = UINT64_MAX, .output_bytes = 2}, /* their sum is 1 modulo 2^64 */
        {.input_bytes = 2, .output_bytes = UINT64_MAX},
        {.input_bytes = UINT64_MAX, .output_bytes = 0},
    };
    of_reorder_choice choice = {.schedule = OF_REORDER_BUDGET, .budget_bytes = 100};
    check_places(choice, layers, 4, (uint32_t[]){0, NOW, NOW, NOW});
    choice.budget_bytes = UINT64_MAX;
    check_places(choice, layers, 4, (uint32_t[]){NOW, NOW, NOW, 0});
}
END_TEST

/* The definition, word by word. */
static bool valid_by_definition(const uint32_t *places, size_t n) {
    size_t held = 0;
    for (size_t i = 0; i < n; i++)
        held += places[i] != NOW;
    for (uint32_t turn = 0; turn < held; turn++) {
        size_t times = 0;
        for (size_t i = 0; i < n; i++)
            times += places[i] == turn;
        if (times != 1)
            return false;
    }
    return true;
}

START_TEST(places_of_every_choice_are_valid_and_in_order) {
    of_layer_work layers[MOST_LAYERS];
    uint32_t places[MOST_LAYERS], order[MOST_LAYERS];
    bool held[MOST_LAYERS];
    for (int round = 0; round < MANY; round++) {
        const size_t n = random_layers(layers);
        for (size_t i = 0; i < n; i++)
            held[i] = random_below(2);
        const of_reorder_choice choice = {.schedule = (of_reorder_schedule)random_below(5),
                                          .k = random_below(n + 1),
                                          .budget_bytes = random_below(600),
                                          .held = held};
        ck_assert_int_eq(of_reorder_places(&choice, layers, n, places), OF_OK);
        ck_assert(valid_by_definition(places, n) && of_reorder_is_valid(places, n));
        size_t n_held = SIZE_MAX;
        ck_assert_int_eq(of_reorder_order(places, n, order, &n_held), OF_OK);
        for (size_t turn = 0; turn < n_held; turn++)
            ck_assert_uint_eq(places[order[turn]], turn);
        for (size_t i = 0; i < n; i++)
            ck_assert(places[i] == NOW || places[i] < n_held);
    }
}
END_TEST

/* Changes valid places so that they are not; false: these have no such mutant. */
static bool mutate(uint32_t *places, size_t n) {
    uint32_t m = 0;
    for (size_t i = 0; i < n; i++)
        m += places[i] != NOW;
    const size_t at = random_below(n), other = random_below(n);
    switch (random_below(5)) {
    case 0: /* a turn twice */
        if (at == other || places[other] == NOW)
            return false;
        places[at] = places[other];
        return true;
    case 1: /* a turn that nobody takes, before those of others */
        if (places[at] == NOW || places[at] == m - 1)
            return false;
        places[at] = NOW;
        return true;
    case 2: /* past the last turn */
        if (places[at] == NOW)
            return false;
        places[at] = m + (uint32_t)random_below(3);
        return true;
    case 3: /* one more, with a gap */
        if (places[at] != NOW)
            return false;
        places[at] = m + 1 + (uint32_t)random_below(3);
        return true;
    default: /* next to the largest number, which is no turn */
        places[at] = NOW - 1 - (uint32_t)random_below(3);
        return true;
    }
}

START_TEST(every_mutant_of_valid_places_is_caught) {
    uint32_t places[MOST_LAYERS];
    int mutants = 0;
    for (int round = 0; round < MANY; round++) {
        const size_t n = 1 + random_below(MOST_LAYERS);
        random_places(n, places);
        ck_assert(of_reorder_is_valid(places, n));
        if (!mutate(places, n))
            continue;
        mutants++;
        ck_assert_msg(!of_reorder_is_valid(places, n), "mutant %d was not caught", mutants);
    }
    ck_assert_int_ge(mutants, MANY / 2);
}
END_TEST

START_TEST(any_numbers_may_be_asked_about) {
    uint32_t places[MOST_LAYERS];
    int valid = 0;
    for (int round = 0; round < 10 * MANY; round++) {
        const size_t n = random_below(MOST_LAYERS + 1);
        for (size_t i = 0; i < n; i++)
            places[i] =
                random_below(3) ? (uint32_t)random_below(n) : NOW - (uint32_t)random_below(2);
        ck_assert_int_eq(of_reorder_is_valid(places, n), valid_by_definition(places, n));
        valid += of_reorder_is_valid(places, n);
    }
    ck_assert_int_ge(valid, MANY / 10);
    ck_assert(of_reorder_is_valid(NULL, 0));
    ck_assert(!of_reorder_is_valid(NULL, 3));
    ck_assert(!of_reorder_is_valid(places, OF_REORDER_AT_ONCE)); /* refused unread, as many are */
    ck_assert(!of_reorder_is_valid(places, SIZE_MAX));
}
END_TEST

/* A backward pass is a list of moments: the layers from the last to the first, each with its dX
 * and perhaps its dW, then the held dW. Each thing in memory lives from one to another. */
static uint64_t peak_by_lifetimes(const of_layer_work *layers, size_t n, const uint32_t *places) {
    size_t dx[MOST_LAYERS], dw[MOST_LAYERS];
    size_t moment = 0;
    for (size_t i = n; i-- > 0;) {
        dx[i] = moment++;
        dw[i] = places[i] == NOW ? moment++ : SIZE_MAX;
    }
    for (size_t i = 0; i < n; i++)
        if (places[i] != NOW)
            dw[i] = moment + places[i];
    uint64_t peak = 0;
    for (moment = 0; moment < 2 * n; moment++) {
        uint64_t alive = 0;
        for (size_t i = 0; i < n; i++) {
            const of_layer_work *l = &layers[i];
            const bool at_work = moment == dx[i] || (places[i] == NOW && moment == dw[i]);
            const bool made = l->frees_gradient ? moment == dw[i] : moment >= dw[i];
            alive += moment <= dw[i] ? l->input_bytes : 0;
            alive += dx[i] <= moment && moment <= dw[i] ? l->output_bytes : 0;
            alive += at_work && l->has_input_gradient ? l->input_bytes : 0;
            alive += made ? l->weight_bytes : 0;
        }
        peak = alive > peak ? alive : peak;
    }
    return peak;
}

START_TEST(the_peak_is_that_of_the_lifetimes) {
    of_layer_work layers[MOST_LAYERS];
    uint32_t places[MOST_LAYERS], stock[MOST_LAYERS];
    for (size_t i = 0; i < MOST_LAYERS; i++)
        stock[i] = NOW;
    for (int round = 0; round < MANY; round++) {
        const size_t n = random_layers(layers);
        random_places(n, places);
        uint64_t bytes = 0;
        const uint64_t expected = peak_by_lifetimes(layers, n, places);
        const uint64_t before = peak_by_lifetimes(layers, n, stock);
        ck_assert_int_eq(of_reorder_peak_bytes(layers, n, places, &bytes), OF_OK);
        ck_assert_uint_eq(bytes, expected);
        ck_assert_int_eq(of_reorder_peak_bytes(layers, n, NULL, &bytes), OF_OK);
        ck_assert_uint_eq(bytes, before);
        ck_assert_uint_eq(of_reorder_extra_bytes(layers, n, places),
                          expected > before ? expected - before : 0);
    }
}
END_TEST

START_TEST(the_peak_of_two_layers_is_that_counted_by_hand) {
    static const of_layer_work layers[] = {
        {.input_bytes = 10, .output_bytes = 20, .weight_bytes = 3},
        {.input_bytes = 20, .output_bytes = 7, .weight_bytes = 4, .has_input_gradient = true},
    };
    uint64_t bytes = 0;
    /* dW of layer 1: both x, its dY, the dX just made, itself. */
    ck_assert_int_eq(of_reorder_peak_bytes(layers, 2, NULL, &bytes), OF_OK);
    ck_assert_uint_eq(bytes, 10 + 20 + 7 + 20 + 4);
    /* The first held dW: both x, both dY, itself; 0 is smaller than 1. */
    ck_assert_int_eq(of_reorder_peak_bytes(layers, 2, (uint32_t[]){1, 0}, &bytes), OF_OK);
    ck_assert_uint_eq(bytes, 10 + 20 + 7 + 20 + 4);
    ck_assert_uint_eq(of_reorder_extra_bytes(layers, 2, (uint32_t[]){1, 0}), 0);
    /* The dW of layer 0 is the largest thing of all, and stock makes it when least is alive. */
    of_layer_work wide[] = {layers[0], layers[1]};
    wide[0].weight_bytes = 50;
    ck_assert_int_eq(of_reorder_peak_bytes(wide, 2, NULL, &bytes), OF_OK);
    ck_assert_uint_eq(bytes, 10 + 20 + 4 + 50);
    ck_assert_uint_eq(of_reorder_extra_bytes(wide, 2, (uint32_t[]){0, 1}),
                      (10 + 20 + 20 + 7 + 50) - (10 + 20 + 4 + 50));
}
END_TEST

/* 32 x Linear(256, 256) in float32. */
enum { LINEARS = 32 };
static const uint64_t WEIGHT = 4 * ((uint64_t)256 * 256 + 256);

static void linears(of_layer_work *layers, uint64_t rows, bool frees_gradient) {
    for (size_t i = 0; i < LINEARS; i++)
        layers[i] = (of_layer_work){.input_bytes = rows * 256 * 4,
                                    .output_bytes = rows * 256 * 4,
                                    .weight_bytes = WEIGHT,
                                    .has_input_gradient = i > 0,
                                    .frees_gradient = frees_gradient};
}

static uint64_t extra(const of_layer_work *layers, of_reorder_schedule schedule, size_t k) {
    uint32_t places[LINEARS];
    const of_reorder_choice choice = {.schedule = schedule, .k = k};
    ck_assert_int_eq(of_reorder_places(&choice, layers, LINEARS, places), OF_OK);
    return of_reorder_extra_bytes(layers, LINEARS, places);
}

START_TEST(half_of_32_linears_are_held_for_nothing_if_gradients_are_freed) {
    of_layer_work layers[LINEARS];
    for (uint64_t rows = 16; rows <= 4096; rows *= 2) {
        const uint64_t x = rows * 256 * 4;
        linears(layers, rows, true);
        for (size_t k = 0; k <= LINEARS / 2 + 1; k++)
            ck_assert_uint_eq(extra(layers, OF_REORDER_REVERSE_FIRST, k), 0);
        /* From there on an x and a dY more each: stock's peak is that of its first dW. */
        for (size_t k = LINEARS / 2 + 2; k <= LINEARS; k++)
            ck_assert_uint_eq(extra(layers, OF_REORDER_REVERSE_FIRST, k), (2 * k - 34) * x);
    }
}
END_TEST

START_TEST(gradients_that_stay_leave_less_room_for_held_ones) {
    of_layer_work layers[LINEARS];
    const uint64_t x = WEIGHT - 4 * (uint64_t)256; /* nearly a weight's bytes */
    linears(layers, 256, false);
    const uint64_t stock = 4 * x + 31 * WEIGHT; /* dW of layer 1 */
    for (size_t k = 0; k <= LINEARS; k++) {
        const uint64_t held = 2 * k * x + (LINEARS - k + 1) * WEIGHT; /* dW of layer 0 */
        ck_assert_uint_eq(extra(layers, OF_REORDER_REVERSE_FIRST, k), k >= 3 ? held - stock : 0);
    }
    linears(layers, 2048 + 8, false); /* x as large as 8 weights, with their biases */
    ck_assert_uint_eq(extra(layers, OF_REORDER_REVERSE_FIRST, 16), 0);
    linears(layers, 2048 + 7, false);
    ck_assert_uint_gt(extra(layers, OF_REORDER_REVERSE_FIRST, 16), 0);
}
END_TEST

/* Part of the peak with the parameters. */
static double all_last(uint64_t rows) {
    of_layer_work layers[LINEARS];
    uint64_t stock = 0;
    linears(layers, rows, true);
    ck_assert_int_eq(of_reorder_peak_bytes(layers, LINEARS, NULL, &stock), OF_OK);
    const double before = (double)(stock + LINEARS * WEIGHT);
    return (before + (double)extra(layers, OF_REORDER_LAST, 0)) / before;
}

START_TEST(all_weight_gradients_last_take_up_to_1_7_times_the_memory) {
    ck_assert_double_eq_tol(all_last(512), 1.593, 0.001);
    ck_assert_double_eq_tol(all_last(768), 1.666, 0.001);
    ck_assert_double_eq_tol(all_last(1024), 1.709, 0.001);
}
END_TEST

START_TEST(a_budget_is_what_the_peak_grows_by_at_most) {
    of_layer_work layers[MOST_LAYERS];
    uint32_t places[MOST_LAYERS];
    for (int round = 0; round < MANY; round++) {
        const size_t n = random_layers(layers);
        for (size_t i = 0; i < n; i++) /* all alike */
            layers[i].frees_gradient = round % 2;
        const uint64_t budget = random_below(600);
        const of_reorder_choice choice = {.schedule = OF_REORDER_BUDGET, .budget_bytes = budget};
        ck_assert_int_eq(of_reorder_places(&choice, layers, n, places), OF_OK);
        ck_assert_uint_le(of_reorder_extra_bytes(layers, n, places), budget);
    }
}
END_TEST

/* Must be refused with these words, and write nothing. */
static void refused(const of_reorder_choice *choice, const of_layer_work *layers, size_t n,
                    const char *message) {
    uint32_t places[] = {71, 72, 73};
    ck_assert_int_eq(of_reorder_places(choice, layers, n, places), OF_INVALID);
    ck_assert_msg(strstr(of_error_message(), message), "%s", of_error_message());
    ck_assert(places[0] == 71 && places[1] == 72 && places[2] == 73);
}

START_TEST(bad_choices_are_refused_and_change_nothing) {
    static const of_layer_work layers[3] = {{.input_bytes = 1}};
    of_reorder_choice choice = {.schedule = OF_REORDER_REVERSE_FIRST, .k = 4};
    refused(&choice, layers, 3, "first 4 layers can't be held: there are 3 layers");
    choice.k = SIZE_MAX;
    refused(&choice, layers, 3, "Pass a k from 0 to 3");
    choice = (of_reorder_choice){.schedule = OF_REORDER_BUDGET, .budget_bytes = 9};
    refused(&choice, NULL, 3, "needs the layers' bytes");
    choice = (of_reorder_choice){.schedule = OF_REORDER_CHOSEN};
    refused(&choice, layers, 3, "one flag for each layer");
    choice = (of_reorder_choice){.schedule = (of_reorder_schedule)5};
    refused(&choice, layers, 3, "no schedule 5");
    choice = (of_reorder_choice){.schedule = (of_reorder_schedule)-1};
    refused(&choice, layers, 3, "no schedule -1");
    choice = (of_reorder_choice){.schedule = OF_REORDER_LAST};
    refused(&choice, layers, UINT32_MAX, "more than there are turns: at most 4294967294");
    refused(&choice, layers, SIZE_MAX, "more than there are turns");
    refused(NULL, layers, 3, "need a choice");
    ck_assert_int_eq(of_reorder_places(&choice, layers, 3, NULL), OF_INVALID);
    ck_assert_int_eq(of_reorder_places(&choice, NULL, 0, NULL), OF_OK);
}
END_TEST

START_TEST(bad_places_have_no_memory_and_no_order) {
    static const of_layer_work layers[2] = {{.input_bytes = 1}};
    static const uint32_t twice[] = {0, 0}, past_the_last[] = {OF_REORDER_AT_ONCE, 1};
    uint32_t order[] = {NOW, NOW};
    uint64_t bytes = 77;
    size_t n_held = 78;
    ck_assert_int_eq(of_reorder_peak_bytes(layers, 2, twice, &bytes), OF_INVALID);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "a turn of its own from 0 to m - 1"));
    ck_assert_int_eq(of_reorder_order(twice, 2, order, &n_held), OF_INVALID);
    ck_assert_uint_eq(of_reorder_extra_bytes(layers, 2, twice), UINT64_MAX);
    ck_assert_int_eq(of_reorder_order(past_the_last, 2, order, &n_held), OF_INVALID);
    ck_assert_int_eq(of_reorder_order(NULL, 2, order, &n_held), OF_INVALID);
    ck_assert_int_eq(of_reorder_order(twice, UINT32_MAX, order, &n_held), OF_INVALID);
    ck_assert_int_eq(of_reorder_order(twice, SIZE_MAX, order, &n_held), OF_INVALID);
    ck_assert_int_eq(of_reorder_peak_bytes(NULL, 2, NULL, &bytes), OF_INVALID);
    ck_assert_int_eq(of_reorder_peak_bytes(layers, 2, NULL, NULL), OF_INVALID);
    ck_assert(bytes == 77 && n_held == 78);
    ck_assert_uint_eq(of_reorder_extra_bytes(NULL, 0, NULL), 0);
}
END_TEST

START_TEST(bytes_beyond_64_bits_are_refused) {
    of_layer_work layers[2] = {{.input_bytes = UINT64_MAX / 4}, {.output_bytes = UINT64_MAX / 2}};
    uint64_t bytes = 77;
    ck_assert_int_eq(of_reorder_peak_bytes(layers, 2, NULL, &bytes), OF_OK);
    ck_assert_uint_eq(bytes, UINT64_MAX / 4 + UINT64_MAX / 2);
    layers[0].weight_bytes = 1; /* with x, dX and dY 2^64 - 2, the largest sum that fits */
    ck_assert_int_eq(of_reorder_peak_bytes(layers, 2, NULL, &bytes), OF_OK);
    layers[0].weight_bytes = 2;
    ck_assert_int_eq(of_reorder_peak_bytes(layers, 2, NULL, &bytes), OF_INVALID);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "do not fit 64 bits"));
    ck_assert_uint_eq(of_reorder_extra_bytes(layers, 2, (uint32_t[]){0, 1}), UINT64_MAX);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("reorder");
    TCase *tests = tcase_create("reorder");
    tcase_add_test(tests, each_schedule_has_the_places_of_its_definition);
    tcase_add_test(tests, a_budget_holds_what_fits_from_the_last_layer_on);
    tcase_add_test(tests, a_budget_is_never_exceeded_and_no_layer_that_fits_is_left_out);
    tcase_add_test(tests, a_budget_of_any_size_meets_layers_of_any_size);
    tcase_add_test(tests, places_of_every_choice_are_valid_and_in_order);
    tcase_add_test(tests, every_mutant_of_valid_places_is_caught);
    tcase_add_test(tests, any_numbers_may_be_asked_about);
    tcase_add_test(tests, the_peak_is_that_of_the_lifetimes);
    tcase_add_test(tests, the_peak_of_two_layers_is_that_counted_by_hand);
    tcase_add_test(tests, half_of_32_linears_are_held_for_nothing_if_gradients_are_freed);
    tcase_add_test(tests, gradients_that_stay_leave_less_room_for_held_ones);
    tcase_add_test(tests, all_weight_gradients_last_take_up_to_1_7_times_the_memory);
    tcase_add_test(tests, a_budget_is_what_the_peak_grows_by_at_most);
    tcase_add_test(tests, bad_choices_are_refused_and_change_nothing);
    tcase_add_test(tests, bad_places_have_no_memory_and_no_order);
    tcase_add_test(tests, bytes_beyond_64_bits_are_refused);
    suite_add_tcase(suite, tests);
    return run(suite);
}
