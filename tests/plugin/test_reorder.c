/* SPDX-License-Identifier: BSD-3-Clause */
/* Where weight gradients run in a backward pass, and what that takes in memory. */
#include "fixture.h"
#include "planners/reorder/reorder.h"
#include "random_work.h"

enum { MANY = 4000 };
static const uint32_t NOW = OF_REORDER_AT_ONCE;

/* The definition of each schedule. */
static void places_by_definition(const of_reorder_choice *choice, const of_layer_work *layers,
                                 size_t n, uint32_t *places) {
    const bool ascending =
        choice->schedule == OF_REORDER_REVERSE_FIRST || choice->schedule == OF_REORDER_CHOSEN;
    unsigned __int128 held = 0;
    uint32_t turn = 0;
    for (size_t i = 0; i < n; i++)
        places[i] = NOW;
    for (size_t at = 0; at < n; at++) {
        const size_t i = ascending ? at : n - 1 - at;
        const of_layer_work *l = layers ? &layers[i] : NULL;
        const unsigned __int128 own = l ? (unsigned __int128)l->input_bytes + l->output_bytes : 0;
        const bool waits[] = {
            [OF_REORDER_STOCK] = false,
            [OF_REORDER_LAST] = true,
            [OF_REORDER_REVERSE_FIRST] = i < choice->k,
            [OF_REORDER_BUDGET] = held + own <= choice->budget_bytes,
            [OF_REORDER_CHOSEN] = choice->held && choice->held[i],
        };
        if (!waits[choice->schedule])
            continue;
        places[i] = turn++;
        held += own;
    }
}

/* The definition of valid places, word by word. */
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

/* Layers of any sizes, some of which have bytes of which two make more than 64 bits hold. */
TEST(places_are_those_of_the_definition_and_valid) {
    of_layer_work layers[MOST_LAYERS];
    uint32_t places[MOST_LAYERS + 1], expected[MOST_LAYERS], order[MOST_LAYERS];
    bool held[MOST_LAYERS];
    int waiting[OF_REORDER_CHOSEN + 1] = {0};
    for (int round = 0; round < 2 * MANY; round++) {
        const size_t n = random_layers(layers);
        for (size_t i = 0; i < n; i++) {
            held[i] = random_below(2);
            if (random_below(20) == 0)
                layers[i].input_bytes = UINT64_MAX - random_below(2);
            if (random_below(5) == 0)
                layers[i].output_bytes = random_below(4) ? 0 : UINT64_MAX;
        }
        const uint64_t budgets[] = {random_below(600), UINT64_MAX,
                                    layers[n - 1].input_bytes + layers[n - 1].output_bytes};
        const of_reorder_choice choice = {.schedule = (of_reorder_schedule)random_below(5),
                                          .k = random_below(n + 1),
                                          .budget_bytes = budgets[random_below(3)],
                                          .held = held};
        const bool needs_layers = choice.schedule == OF_REORDER_BUDGET;
        places[n] = 71;
        OK(of_reorder_places(&choice, needs_layers ? layers : NULL, n, places));
        places_by_definition(&choice, needs_layers ? layers : NULL, n, expected);
        for (size_t i = 0; i < n; i++)
            ck_assert_msg(places[i] == expected[i], "schedule %d, layer %zu: %u instead of %u",
                          (int)choice.schedule, i, places[i], expected[i]);
        ck_assert_uint_eq(places[n], 71); /* and nothing behind them is written */
        ck_assert(valid_by_definition(places, n) && of_reorder_is_valid(places, n));
        size_t n_held = SIZE_MAX;
        OK(of_reorder_order(places, n, order, &n_held));
        for (size_t turn = 0; turn < n_held; turn++)
            ck_assert_uint_eq(places[order[turn]], turn);
        for (size_t i = 0; i < n; i++)
            ck_assert(places[i] == NOW || places[i] < n_held);
        waiting[choice.schedule] += n_held > 0 && n_held < n;
    }
    for (of_reorder_schedule s = OF_REORDER_REVERSE_FIRST; s <= OF_REORDER_CHOSEN; s++)
        ck_assert_int_gt(waiting[s], MANY / 10);
}

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

TEST(every_mutant_of_valid_places_is_caught) {
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

TEST(any_numbers_may_be_asked_about) {
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

TEST(the_peak_is_that_of_the_lifetimes) {
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
        OK(of_reorder_peak_bytes(layers, n, places, &bytes));
        ck_assert_uint_eq(bytes, expected);
        OK(of_reorder_peak_bytes(layers, n, NULL, &bytes));
        ck_assert_uint_eq(bytes, before);
        ck_assert_uint_eq(of_reorder_extra_bytes(layers, n, places),
                          expected > before ? expected - before : 0);
    }
}

/* 32 x Linear(256, 256) in float32. */
TEST(half_of_32_linears_are_held_for_nothing_if_gradients_are_freed) {
    enum { LINEARS = 32 };
    of_layer_work layers[LINEARS];
    uint32_t places[LINEARS];
    for (uint64_t rows = 16; rows <= 4096; rows *= 2) {
        const uint64_t x = rows * 256 * 4;
        for (size_t i = 0; i < LINEARS; i++)
            layers[i] = (of_layer_work){.input_bytes = x,
                                        .output_bytes = x,
                                        .weight_bytes = 4 * ((uint64_t)256 * 256 + 256),
                                        .has_input_gradient = i > 0,
                                        .frees_gradient = true};
        /* From the half on an x and a dY more each: stock's peak is that of its first dW. */
        for (size_t k = 0; k <= LINEARS; k++) {
            const of_reorder_choice choice = {.schedule = OF_REORDER_REVERSE_FIRST, .k = k};
            OK(of_reorder_places(&choice, NULL, LINEARS, places));
            ck_assert_uint_eq(of_reorder_extra_bytes(layers, LINEARS, places),
                              k > LINEARS / 2 + 1 ? (2 * k - 34) * x : 0);
        }
    }
}

TEST(a_budget_is_what_the_peak_grows_by_at_most) {
    of_layer_work layers[MOST_LAYERS];
    uint32_t places[MOST_LAYERS];
    for (int round = 0; round < MANY; round++) {
        const size_t n = random_layers(layers);
        for (size_t i = 0; i < n; i++) /* all alike */
            layers[i].frees_gradient = round % 2;
        const uint64_t budget = random_below(600);
        const of_reorder_choice choice = {.schedule = OF_REORDER_BUDGET, .budget_bytes = budget};
        OK(of_reorder_places(&choice, layers, n, places));
        ck_assert_uint_le(of_reorder_extra_bytes(layers, n, places), budget);
    }
}

/* Must be refused with these words, and write nothing. */
static void refused(const of_reorder_choice *choice, const of_layer_work *layers, size_t n,
                    const char *message) {
    uint32_t places[] = {71, 72, 73};
    INVALID(of_reorder_places(choice, layers, n, places), message);
    ck_assert(places[0] == 71 && places[1] == 72 && places[2] == 73);
}

TEST(bad_choices_are_refused_and_change_nothing) {
    static const of_layer_work layers[3] = {{.input_bytes = 1}};
    static const struct {
        of_reorder_choice choice;
        const of_layer_work *layers;
        size_t n;
        const char *words;
    } bad[] = {
        /* clang-format off */
        {{.schedule = OF_REORDER_REVERSE_FIRST, .k = 4}, layers, 3,
         "first 4 layers can't be held: there are 3 layers"},
        {{.schedule = OF_REORDER_REVERSE_FIRST, .k = SIZE_MAX}, layers, 3, "Pass a k from 0 to 3"},
        {{.schedule = OF_REORDER_BUDGET, .budget_bytes = 9}, NULL, 3, "needs the layers' bytes"},
        {{.schedule = OF_REORDER_CHOSEN}, layers, 3, "one flag for each layer"},
        {{.schedule = (of_reorder_schedule)5}, layers, 3, "no schedule 5"},
        {{.schedule = (of_reorder_schedule)-1}, layers, 3, "no schedule -1"},
        {{.schedule = OF_REORDER_LAST}, layers, UINT32_MAX,
         "more than there are turns: at most 4294967294"},
        {{.schedule = OF_REORDER_LAST}, layers, SIZE_MAX, "more than there are turns"},
        /* clang-format on */
    };
    for (size_t i = 0; i < LENGTH(bad); i++)
        refused(&bad[i].choice, bad[i].layers, bad[i].n, bad[i].words);
    refused(NULL, layers, 3, "need a choice");
    const of_reorder_choice last = {.schedule = OF_REORDER_LAST};
    INVALID(of_reorder_places(&last, layers, 3, NULL), "");
    OK(of_reorder_places(&last, NULL, 0, NULL));
}

TEST(bad_places_have_no_memory_and_no_order) {
    static const of_layer_work layers[2] = {{.input_bytes = 1}};
    static const uint32_t twice[] = {0, 0}, past_the_last[] = {OF_REORDER_AT_ONCE, 1};
    uint32_t order[] = {NOW, NOW};
    uint64_t bytes = 77;
    size_t n_held = 78;
    INVALID(of_reorder_peak_bytes(layers, 2, twice, &bytes), "a turn of its own from 0 to m - 1");
    INVALID(of_reorder_order(twice, 2, order, &n_held), "");
    ck_assert_uint_eq(of_reorder_extra_bytes(layers, 2, twice), UINT64_MAX);
    INVALID(of_reorder_order(past_the_last, 2, order, &n_held), "");
    INVALID(of_reorder_order(NULL, 2, order, &n_held), "");
    INVALID(of_reorder_order(twice, UINT32_MAX, order, &n_held), "");
    INVALID(of_reorder_order(twice, SIZE_MAX, order, &n_held), "");
    INVALID(of_reorder_peak_bytes(NULL, 2, NULL, &bytes), "");
    INVALID(of_reorder_peak_bytes(layers, 2, NULL, NULL), "");
    ck_assert(bytes == 77 && n_held == 78);
    ck_assert_uint_eq(of_reorder_extra_bytes(NULL, 0, NULL), 0);
}

TEST(bytes_beyond_64_bits_are_refused) {
    of_layer_work layers[2] = {{.input_bytes = UINT64_MAX / 4}, {.output_bytes = UINT64_MAX / 2}};
    uint64_t bytes = 77;
    OK(of_reorder_peak_bytes(layers, 2, NULL, &bytes));
    ck_assert_uint_eq(bytes, UINT64_MAX / 4 + UINT64_MAX / 2);
    layers[0].weight_bytes = 1; /* with x, dX and dY 2^64 - 2, the largest sum that fits */
    OK(of_reorder_peak_bytes(layers, 2, NULL, &bytes));
    layers[0].weight_bytes = 2;
    INVALID(of_reorder_peak_bytes(layers, 2, NULL, &bytes), "do not fit 64 bits");
    ck_assert_uint_eq(of_reorder_extra_bytes(layers, 2, (uint32_t[]){0, 1}), UINT64_MAX);
}
