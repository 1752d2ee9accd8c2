/* SPDX-License-Identifier: BSD-3-Clause */
/* Layers in training under a schedule: forward passes, plans, and who waits how long. */
#include "fixture.h"
#include "planners/reorder/reordering.h"

enum { N = 5, X = 100, Y = 40 };

static of_reordering *reordering; /* of the test */
static of_layer_user user;

static void begin(of_reorder_choice choice, const bool *fixed) {
    OK(of_reordering_create(&choice, fixed, N, &reordering));
    user = of_reordering_user(reordering);
}

static void end(void) {
    of_reordering_release(reordering);
}

/* A test of layers under this schedule; the fields of an of_reorder_choice. */
#define SCHEDULED(name, ...) AROUND(name, begin((of_reorder_choice){__VA_ARGS__}, NULL), end())

static bool used(size_t layer, bool recomputed) {
    const of_layer_use sizes = {.input_bytes = X,
                                .output_bytes = Y,
                                .weight_bytes = 8,
                                .has_input_gradient = layer != 0,
                                .recomputed = recomputed};
    return user.use(user.ctx, layer, &sizes);
}

static void whole_forward(void) {
    for (size_t i = 0; i < N; i++)
        ck_assert(used(i, false));
}

static uint64_t dx_has_run(size_t layer) {
    return user.wait(user.ctx, layer, X + Y);
}

static void dw_has_run(size_t layer) {
    user.done(user.ctx, layer);
    user.forget(user.ctx, layer);
}

/* The priorities of a whole backward pass, all of whose dW have run. */
static void whole_backward(uint64_t *priorities) {
    for (size_t i = N; i-- > 0;)
        priorities[i] = dx_has_run(i);
    for (size_t i = 0; i < N; i++)
        if (priorities[i] != 0)
            dw_has_run(i);
        else
            user.forget(user.ctx, i);
}

static uint64_t held(bool most) {
    uint64_t found[2];
    of_reordering_held(reordering, &found[0], &found[1]);
    return found[most];
}

SCHEDULED(priorities_follow_the_turns, .schedule = OF_REORDER_REVERSE_FIRST, .k = 3) {
    uint64_t p[N];
    for (int i = 0; i < 3; i++) {
        whole_forward();
        whole_backward(p);
        ck_assert(OF_PRIORITIES > p[0] && p[0] > p[1] && p[1] > p[2] && p[2] > 0);
        ck_assert(p[3] == 0 && p[4] == 0);
        ck_assert_uint_eq(held(false), 0);
    }
    ck_assert_uint_eq(held(true), 3 * (X + Y));
}

SCHEDULED(a_later_use_of_a_layer_comes_first, .schedule = OF_REORDER_LAST) {
    whole_forward();
    ck_assert(used(2, false));
    ck_assert(used(2, false));
    const uint64_t last = dx_has_run(4), third = dx_has_run(2), second = dx_has_run(2);
    const uint64_t first = dx_has_run(2), before = dx_has_run(1);
    ck_assert(last > third && third > second && second > first && first > before);
    ck_assert_uint_eq(held(false), 5 * (X + Y));
    dw_has_run(2);
    dw_has_run(2);
    ck_assert_uint_eq(held(false), 5 * (X + Y)); /* of a layer, all or nothing */
    dw_has_run(2);
    ck_assert_uint_eq(held(false), 2 * (X + Y));
}

SCHEDULED(more_uses_than_priorities_are_left_alone, .schedule = OF_REORDER_LAST) {
    size_t n = 0;
    while (used(0, false))
        n++;
    ck_assert_uint_eq(n, (OF_PRIORITIES - 1) / N);
    uint64_t before = OF_PRIORITIES;
    for (size_t i = 0; i < n; i++) {
        const uint64_t p = dx_has_run(0);
        ck_assert_msg(0 < p && p < before, "use %zu: %zu after %zu", i, (size_t)p, (size_t)before);
        before = p;
    }
}

TEST(layers_that_are_fixed_or_recomputed_never_wait) {
    const bool fixed[N] = {[1] = true};
    begin((of_reorder_choice){.schedule = OF_REORDER_LAST}, fixed);
    for (size_t i = 0; i < N; i++)
        if (i != 3)
            ck_assert(used(i, false));
    ck_assert(dx_has_run(4) != 0);
    ck_assert(used(3, true)); /* a checkpoint, in the middle of backward */
    ck_assert_uint_eq(dx_has_run(3), 0);
    ck_assert(dx_has_run(2) != 0);
    ck_assert_uint_eq(dx_has_run(1), 0);
    of_reordered rows[N];
    size_t n;
    uint64_t extra;
    OK(of_reordering_plan(reordering, rows, N, &n, &extra));
    ck_assert_uint_eq(n, N);
    ck_assert(rows[4].layer == 3 && rows[4].recomputed && rows[4].place == OF_REORDER_AT_ONCE);
    ck_assert(rows[1].fixed && rows[1].place == OF_REORDER_AT_ONCE);
    ck_assert(rows[3].layer == 4 && rows[3].place == 0 && rows[2].place == 1);
    end();
}

SCHEDULED(the_budget_counts_what_other_passes_keep, .schedule = OF_REORDER_BUDGET,
          .budget_bytes = 2 * (X + Y)) {
    whole_forward();
    ck_assert(dx_has_run(4) != 0 && dx_has_run(3) != 0);
    ck_assert_uint_eq(dx_has_run(2), 0);
    uint64_t p[N];
    whole_forward(); /* the first pass has failed, and its graph is still there */
    whole_backward(p);
    for (size_t i = 0; i < 3; i++)
        ck_assert_uint_eq(p[i], 0);
    ck_assert_uint_eq(held(true), 2 * (X + Y));
}

SCHEDULED(the_order_is_that_of_the_last_forward_pass, .schedule = OF_REORDER_REVERSE_FIRST,
          .k = 1) {
    uint64_t p[N];
    whole_forward();
    whole_backward(p);
    ck_assert(p[0] != 0 && p[3] == 0);
    ck_assert(used(3, false) && used(0, false));
    ck_assert(dx_has_run(0) == 0 && dx_has_run(3) != 0);
}

SCHEDULED(nothing_waits_after_the_end, .schedule = OF_REORDER_LAST) {
    whole_forward();
    ck_assert(dx_has_run(4) != 0);
    of_reordering_stop(reordering);
    ck_assert_uint_eq(dx_has_run(3), 0);
    ck_assert(!used(0, false));
    dw_has_run(4);
    ck_assert_uint_eq(held(false), 0);
}

/* A forward pass of layers with so many bytes of weights and seconds of dW; F and dX take 1 s. */
static void rehearsed_forward(const uint64_t *bytes, const double *dw, size_t n, double between) {
    double now = 1;
    for (size_t i = 0; i < n; i++) {
        const of_layer_use sizes = {.weight_bytes = bytes[i], .has_input_gradient = i != 0};
        ck_assert(user.use(user.ctx, i, &sizes));
        ck_assert(user.is_rehearsed(user.ctx));
        const of_layer_rehearsal found = {.began = now,
                                          .ended = now + 100,
                                          .forward = 1,
                                          .input_gradient = i != 0,
                                          .weight_gradient = dw[i]};
        user.rehearsed(user.ctx, i, &found);
        now += 100 + between;
    }
}

static of_reordering_best best_of(uint64_t bytes_before) {
    const of_network second_a_byte = {.link.seconds_per_byte = 1};
    of_reordering_best best = {.k = 99};
    OK(of_reordering_best_k(reordering, &second_a_byte, false, bytes_before, UINT64_MAX, &best));
    return best;
}

/* The best order after one forward pass of these layers in training. */
static of_reordering_best rehearsed(const bool *fixed, size_t n, const uint64_t *bytes,
                                    const double *dw, double between, uint64_t bytes_before) {
    begin((of_reorder_choice){.schedule = OF_REORDER_STOCK}, fixed);
    ck_assert(!user.is_rehearsed(user.ctx));
    of_reordering_rehearse(reordering, true);
    rehearsed_forward(bytes, dw, n, between);
    const of_reordering_best best = best_of(bytes_before);
    ck_assert(best.k != 0 || best.times.iteration == best.stock.iteration);
    end();
    return best;
}

/* A layer of 10 bytes that the forward pass begins with, and three of 1 byte. Stock: dW 0 is
 * complete at 11 and through at 21, the last. All four held: from 5 to 15, then three: 18. */
TEST(the_best_order_is_found_after_one_forward_pass) {
    const uint64_t bytes[] = {10, 1, 1, 1};
    const double dw[] = {2, 2, 2, 2};
    of_reordering_best best = rehearsed(NULL, 4, bytes, dw, 0, 0);
    ck_assert_uint_eq(best.k, 4);
    ck_assert_double_eq(best.stock.iteration, 21 + 4);
    ck_assert_double_eq(best.times.iteration, 18 + 4);
    ck_assert_double_eq(best.times.compute, 15);
    best = rehearsed(NULL, 4, bytes, dw, 0.5, 0); /* half a second between layers, each way */
    ck_assert_double_eq(best.stock.compute, 15 + 2 * 3 * 0.5);
}

/* The first layer's message, of 100 s, begins earlier by the seconds of the second one's dW, and
 * 101 s remain. */
TEST(a_gain_of_less_than_three_percent_is_none) {
    static const double seconds[] = {0, 3.0, 3.2}; /* 3.0: 107.0 s for 104 s, 2.9 %; 3.2: 3.1 % */
    for (size_t i = 0; i < 3; i++) {
        const double dw[] = {0, seconds[i]};
        ck_assert_uint_eq(rehearsed(NULL, 2, (uint64_t[]){100, 1}, dw, 0, 0).k, i == 2 ? 2 : 0);
    }
}

TEST(parameters_before_the_layers_are_sent_first) {
    const uint64_t one[] = {1}, shared[] = {1, 100};
    const double late[] = {50}, both[] = {50, 7};
    /* One layer has nothing to wait for. */
    ck_assert_uint_eq(rehearsed(NULL, 1, one, late, 0, 0).k, 0);
    of_reordering_best best = rehearsed(NULL, 1, one, late, 0, 100);
    ck_assert_uint_eq(best.k, 1);
    ck_assert_double_eq(best.stock.iteration, 50 + 101 + 1);
    ck_assert_double_eq(best.times.iteration, 101 + 1);
    const bool fixed[N] = {[1] = true}; /* its weight is an embedding's, too */
    best = rehearsed(fixed, 2, shared, both, 0, 0);
    ck_assert_uint_eq(best.k, 1);
    ck_assert_double_eq(best.stock.iteration, 1 + 7 + 50 + 101 + 2);
}

TEST(too_many_layers_are_refused) {
    of_reordering *none;
    const of_reorder_choice choice = {.schedule = OF_REORDER_LAST};
    INVALID(of_reordering_create(&choice, NULL, OF_PRIORITIES, &none), "");
    ck_assert_ptr_null(none);
}
