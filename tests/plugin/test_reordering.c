/* SPDX-License-Identifier: BSD-3-Clause */
/* Layers in training under a schedule: forward passes, plans, and who waits how long. */
#include "fixture.h"
#include "planners/reorder/reordering.h"

enum { N = 5, X = 100, Y = 40 };

typedef struct of_training {
    of_reordering *reordering;
    of_layer_user user;
} of_training;

static of_training begin(of_reorder_choice choice, const bool *fixed) {
    of_training t;
    OK(of_reordering_create(&choice, fixed, N, &t.reordering));
    t.user = of_reordering_user(t.reordering);
    return t;
}

static bool used(const of_training *t, size_t layer, bool recomputed) {
    const of_layer_use sizes = {.input_bytes = X,
                                .output_bytes = Y,
                                .weight_bytes = 8,
                                .has_input_gradient = layer != 0,
                                .recomputed = recomputed};
    return t->user.use(t->user.ctx, layer, &sizes);
}

static void whole_forward(const of_training *t) {
    for (size_t i = 0; i < N; i++)
        ck_assert(used(t, i, false));
}

static uint64_t dx_has_run(const of_training *t, size_t layer) {
    return t->user.wait(t->user.ctx, layer, X + Y);
}

static void dw_has_run(const of_training *t, size_t layer) {
    t->user.done(t->user.ctx, layer);
    t->user.forget(t->user.ctx, layer);
}

/* The priorities of a whole backward pass, all of whose dW have run. */
static void whole_backward(const of_training *t, uint64_t *priorities) {
    for (size_t i = N; i-- > 0;)
        priorities[i] = dx_has_run(t, i);
    for (size_t i = 0; i < N; i++)
        if (priorities[i] != 0)
            dw_has_run(t, i);
        else
            t->user.forget(t->user.ctx, i);
}

static uint64_t held(const of_training *t, bool most) {
    uint64_t found[2];
    of_reordering_held(t->reordering, &found[0], &found[1]);
    return found[most];
}

TEST(priorities_follow_the_turns) {
    of_training t = begin((of_reorder_choice){.schedule = OF_REORDER_REVERSE_FIRST, .k = 3}, NULL);
    uint64_t p[N];
    for (int i = 0; i < 3; i++) {
        whole_forward(&t);
        whole_backward(&t, p);
        ck_assert(OF_PRIORITIES > p[0] && p[0] > p[1] && p[1] > p[2] && p[2] > 0);
        ck_assert(p[3] == 0 && p[4] == 0);
        ck_assert_uint_eq(held(&t, false), 0);
    }
    ck_assert_uint_eq(held(&t, true), 3 * (X + Y));
    of_reordering_release(t.reordering);
}

TEST(a_later_use_of_a_layer_comes_first) {
    of_training t = begin((of_reorder_choice){.schedule = OF_REORDER_LAST}, NULL);
    whole_forward(&t);
    ck_assert(used(&t, 2, false));
    ck_assert(used(&t, 2, false));
    const uint64_t last = dx_has_run(&t, 4), third = dx_has_run(&t, 2), second = dx_has_run(&t, 2);
    const uint64_t first = dx_has_run(&t, 2), before = dx_has_run(&t, 1);
    ck_assert(last > third && third > second && second > first && first > before);
    ck_assert_uint_eq(held(&t, false), 5 * (X + Y));
    dw_has_run(&t, 2);
    dw_has_run(&t, 2);
    ck_assert_uint_eq(held(&t, false), 5 * (X + Y)); /* of a layer, all or nothing */
    dw_has_run(&t, 2);
    ck_assert_uint_eq(held(&t, false), 2 * (X + Y));
    of_reordering_release(t.reordering);
}

TEST(more_uses_than_priorities_are_left_alone) {
    of_training t = begin((of_reorder_choice){.schedule = OF_REORDER_LAST}, NULL);
    size_t n = 0;
    while (used(&t, 0, false))
        n++;
    ck_assert_uint_eq(n, (OF_PRIORITIES - 1) / N);
    uint64_t before = OF_PRIORITIES;
    for (size_t i = 0; i < n; i++) {
        const uint64_t p = dx_has_run(&t, 0);
        ck_assert_msg(0 < p && p < before, "use %zu: %zu after %zu", i, (size_t)p, (size_t)before);
        before = p;
    }
    of_reordering_release(t.reordering);
}

TEST(layers_that_are_fixed_or_recomputed_never_wait) {
    const bool fixed[N] = {[1] = true};
    of_training t = begin((of_reorder_choice){.schedule = OF_REORDER_LAST}, fixed);
    for (size_t i = 0; i < N; i++)
        if (i != 3)
            ck_assert(used(&t, i, false));
    ck_assert(dx_has_run(&t, 4) != 0);
    ck_assert(used(&t, 3, true)); /* a checkpoint, in the middle of backward */
    ck_assert_uint_eq(dx_has_run(&t, 3), 0);
    ck_assert(dx_has_run(&t, 2) != 0);
    ck_assert_uint_eq(dx_has_run(&t, 1), 0);
    of_reordered rows[N];
    size_t n;
    uint64_t extra;
    OK(of_reordering_plan(t.reordering, rows, N, &n, &extra));
    ck_assert_uint_eq(n, N);
    ck_assert(rows[4].layer == 3 && rows[4].recomputed && rows[4].place == OF_REORDER_AT_ONCE);
    ck_assert(rows[1].fixed && rows[1].place == OF_REORDER_AT_ONCE);
    ck_assert(rows[3].layer == 4 && rows[3].place == 0 && rows[2].place == 1);
    of_reordering_release(t.reordering);
}

TEST(the_budget_counts_what_other_passes_keep) {
    of_training t = begin(
        (of_reorder_choice){.schedule = OF_REORDER_BUDGET, .budget_bytes = 2 * (X + Y)}, NULL);
    whole_forward(&t);
    ck_assert(dx_has_run(&t, 4) != 0 && dx_has_run(&t, 3) != 0);
    ck_assert_uint_eq(dx_has_run(&t, 2), 0);
    uint64_t p[N];
    whole_forward(&t); /* the first pass has failed, and its graph is still there */
    whole_backward(&t, p);
    for (size_t i = 0; i < 3; i++)
        ck_assert_uint_eq(p[i], 0);
    ck_assert_uint_eq(held(&t, true), 2 * (X + Y));
    of_reordering_release(t.reordering);
}

TEST(the_order_is_that_of_the_last_forward_pass) {
    of_training t = begin((of_reorder_choice){.schedule = OF_REORDER_REVERSE_FIRST, .k = 1}, NULL);
    uint64_t p[N];
    whole_forward(&t);
    whole_backward(&t, p);
    ck_assert(p[0] != 0 && p[3] == 0);
    ck_assert(used(&t, 3, false) && used(&t, 0, false));
    ck_assert(dx_has_run(&t, 0) == 0 && dx_has_run(&t, 3) != 0);
    of_reordering_release(t.reordering);
}

TEST(nothing_waits_after_the_end) {
    of_training t = begin((of_reorder_choice){.schedule = OF_REORDER_LAST}, NULL);
    whole_forward(&t);
    ck_assert(dx_has_run(&t, 4) != 0);
    of_reordering_stop(t.reordering);
    ck_assert_uint_eq(dx_has_run(&t, 3), 0);
    ck_assert(!used(&t, 0, false));
    dw_has_run(&t, 4);
    ck_assert_uint_eq(held(&t, false), 0);
    of_reordering_release(t.reordering);
}

/* A forward pass of layers with so many bytes of weights and seconds of dW; F and dX take 1 s. */
static void rehearsed_forward(const of_training *t, const uint64_t *bytes, const double *dw,
                              size_t n, double between) {
    double now = 1;
    for (size_t i = 0; i < n; i++) {
        const of_layer_use sizes = {.weight_bytes = bytes[i], .has_input_gradient = i != 0};
        ck_assert(t->user.use(t->user.ctx, i, &sizes));
        ck_assert(t->user.is_rehearsed(t->user.ctx));
        const of_layer_rehearsal found = {.began = now,
                                          .ended = now + 100,
                                          .forward = 1,
                                          .input_gradient = i != 0,
                                          .weight_gradient = dw[i]};
        t->user.rehearsed(t->user.ctx, i, &found);
        now += 100 + between;
    }
}

static of_reordering_best best_of(const of_training *t, uint64_t bytes_before) {
    const of_network second_a_byte = {.link.seconds_per_byte = 1};
    of_reordering_best best = {.k = 99};
    OK(of_reordering_best_k(t->reordering, &second_a_byte, false, bytes_before, UINT64_MAX, &best));
    return best;
}

static of_training rehearsing(const bool *fixed) {
    of_training t = begin((of_reorder_choice){.schedule = OF_REORDER_STOCK}, fixed);
    ck_assert(!t.user.is_rehearsed(t.user.ctx));
    of_reordering_rehearse(t.reordering, true);
    return t;
}

/* wide_first of test_reorder_simulate.c, and what is computed by hand there. */
static const uint64_t bytes[] = {10, 1, 1, 1};
static const double dw[] = {2, 2, 2, 2};

TEST(the_best_order_is_found_after_one_forward_pass) {
    of_training t = rehearsing(NULL);
    rehearsed_forward(&t, bytes, dw, 4, 0);
    of_reordering_best best = best_of(&t, 0);
    ck_assert_uint_eq(best.k, 4);
    ck_assert_double_eq(best.stock.iteration, 25);
    ck_assert_double_eq(best.times.iteration, 22);
    ck_assert_double_eq(best.times.compute, 15);
    of_reordering_release(t.reordering);

    t = rehearsing(NULL); /* half a second between layers, each way */
    rehearsed_forward(&t, bytes, dw, 4, 0.5);
    best = best_of(&t, 0);
    ck_assert_double_eq(best.stock.compute, 15 + 2 * 3 * 0.5);
    of_reordering_release(t.reordering);
}

/* The first layer's message, of 100 s, begins earlier by the seconds of the second one's dW, and
 * 101 s remain. */
static size_t k_that_gains(double seconds) {
    const uint64_t two[] = {100, 1};
    const double late[] = {0, seconds};
    of_training t = rehearsing(NULL);
    rehearsed_forward(&t, two, late, 2, 0);
    const of_reordering_best best = best_of(&t, 0);
    ck_assert(best.k != 0 || best.times.iteration == best.stock.iteration);
    of_reordering_release(t.reordering);
    return best.k;
}

TEST(a_gain_of_less_than_three_percent_is_none) {
    ck_assert_uint_eq(k_that_gains(0), 0);
    ck_assert_uint_eq(k_that_gains(3.0), 0); /* 107.0 s for 104 s: 2.9 % */
    ck_assert_uint_eq(k_that_gains(3.2), 2); /* 107.2 s: 3.1 % */
}

TEST(parameters_before_the_layers_are_sent_first) {
    const uint64_t one[] = {1};
    const double late[] = {50};
    of_training t = rehearsing(NULL);
    rehearsed_forward(&t, one, late, 1, 0);
    ck_assert_uint_eq(best_of(&t, 0).k, 0); /* one layer has nothing to wait for */
    const of_reordering_best best = best_of(&t, 100);
    ck_assert_uint_eq(best.k, 1);
    ck_assert_double_eq(best.stock.iteration, 50 + 101 + 1);
    ck_assert_double_eq(best.times.iteration, 101 + 1);
    of_reordering_release(t.reordering);

    const bool fixed[N] = {[1] = true}; /* its weight is an embedding's, too */
    const uint64_t shared[] = {1, 100};
    const double both[] = {50, 7};
    t = rehearsing(fixed);
    rehearsed_forward(&t, shared, both, 2, 0);
    ck_assert_uint_eq(best_of(&t, 0).k, 1);
    ck_assert_double_eq(best_of(&t, 0).stock.iteration, 1 + 7 + 50 + 101 + 2);
    of_reordering_release(t.reordering);
}

TEST(too_many_layers_are_refused) {
    of_reordering *none;
    const of_reorder_choice choice = {.schedule = OF_REORDER_LAST};
    INVALID(of_reordering_create(&choice, NULL, OF_PRIORITIES, &none), "");
    ck_assert_ptr_null(none);
}
