/* SPDX-License-Identifier: BSD-3-Clause */
/* Simulated pipelines: no random plan violates what it needs, and small ones take what is counted
 * by hand. */
#include <math.h>

#include "random_pipeline.h"

enum { PLANS = 4000 };

TEST(no_random_plan_violates_anything) {
    size_t of_strategies[OF_PIPELINE_STRATEGIES] = {0}, tasks = 0;
    for (int k = 0; k < PLANS; k++) {
        draw(0);
        of_strategies[d.p.strategy]++;
        tasks += d.n;
        ck_assert_msg(violations() == 0, "plan %d, strategy %d: %zu violations", k,
                      (int)d.p.strategy, violations());
    }
    for (int s = 0; s < OF_PIPELINE_STRATEGIES; s++)
        ck_assert_uint_gt(of_strategies[s], PLANS / 10);
    ck_assert_uint_gt(tasks, 100 * PLANS);
}

/* Two layers on processes 0 and 1, three batches. */
static void two_stages(of_strategy strategy) {
    fresh();
    d.p = (of_pipeline){strategy, 3, 1, 0, 0, d.layers, d.places, 2};
    d.batches = 3;
    d.link = (of_network_link){1, 0.25};
    d.layers[0] = (of_pipeline_layer){2, 9, 3, 1, 8, 4, 12, 64, true};
    d.layers[1] = (of_pipeline_layer){4, 6, 5, 1, 4, 8, 16, 64, true};
    d.places[0] = (of_pipeline_place){0, 0, 0, OF_NO_PROCESS, 0, 1};
    d.places[1] = (of_pipeline_place){1, 1, 1, OF_NO_PROCESS, 0, 1};
}

static void check_time(of_task_kind kind, int32_t layer, int32_t batch, double start, double end) {
    for (size_t k = 0; k < d.n; k++) {
        const of_pipeline_task *t = &d.tasks[k];
        if (t->kind != (int32_t)kind || t->layer != layer || t->batch != batch)
            continue;
        ck_assert_msg(t->start == start && t->end == end,
                      "kind %d, layer %d, batch %d: %g to %g instead of %g to %g", t->kind, layer,
                      batch, t->start, t->end, start, end);
        return;
    }
    ck_abort_msg("there is no task of kind %d, layer %d, batch %d", (int)kind, layer, batch);
}

TEST(stages_take_what_is_counted_by_hand) {
    two_stages(OF_PIPELINE_1F1B);
    run();
    check_time(OF_TASK_FORWARD, 0, 0, 0, 2);
    check_time(OF_TASK_FORWARD, 1, 0, 4, 8); /* a message of 4 bytes takes 2 */
    check_time(OF_TASK_INPUT_GRADIENT, 1, 0, 8, 14);
    check_time(OF_TASK_WEIGHT_GRADIENT, 1, 0, 14, 19);
    check_time(OF_TASK_UPDATE, 1, 0, 19, 20);
    check_time(OF_TASK_FORWARD, 0, 1, 2, 4); /* D = 1 */
    check_time(OF_TASK_WEIGHT_GRADIENT, 0, 0, 16, 19);
    check_time(OF_TASK_UPDATE, 0, 0, 19, 20);
    check_time(OF_TASK_FORWARD, 0, 2, 20, 22);
    check_time(OF_TASK_INPUT_GRADIENT, 1, 2, 40, 46);
    check_time(OF_TASK_UPDATE, 0, 2, 51, 52);
    check_time(OF_TASK_UPDATE, 1, 2, 51, 52);
    ck_assert_double_eq(d.report.makespan, 52);
    ck_assert_double_eq(d.report.period, 16);
    ck_assert_double_eq_tol(d.report.busy, (3 * 6 + 3 * 16) / (52. * 3), 1e-12);
    ck_assert_double_eq(d.report.messages, 2);
    ck_assert_double_eq(d.report.bytes, 8);
}

TEST(split_gradients_take_what_is_counted_by_hand) {
    two_stages(OF_PIPELINE_LAYERPIPE);
    d.batches = 1;
    d.places[1] = (of_pipeline_place){1, 2, 1, 2, 48, 1};
    run();
    check_time(OF_TASK_FORWARD, 1, 0, 4, 8);
    check_time(OF_TASK_INPUT_GRADIENT, 1, 0, 8, 12.5); /* 48 of 64 channels */
    /* A quarter of 16 bytes of weights and 8 of dY take 4. */
    check_time(OF_TASK_SECOND_INPUT_GRADIENT, 1, 0, 12, 13.5);
    check_time(OF_TASK_WEIGHT_GRADIENT, 1, 0, 13.5, 18.5);   /* 4 bytes of x and 8 of dY: at 12 */
    check_time(OF_TASK_UPDATE, 1, 0, 23.5, 24.5);            /* 16 bytes */
    check_time(OF_TASK_WEIGHT_GRADIENT, 0, 0, 14.75, 17.75); /* 1 byte of the second part */
    ck_assert_double_eq(d.report.messages, 6);
    ck_assert_double_eq(d.report.bytes, 4 + 12 + 12 + 16 + 3 + 1);
}

TEST(what_a_process_needs_twice_is_sent_once) {
    two_stages(OF_PIPELINE_LAYERPIPE);
    d.p.n = 3;
    d.batches = 1;
    d.layers[2] = d.layers[1];
    d.places[1] = (of_pipeline_place){1, 2, 2, OF_NO_PROCESS, 0, 1};
    d.places[2] = (of_pipeline_place){1, 1, 1, OF_NO_PROCESS, 0, 1};
    run();
    /* y of layer 0; x, weights and one dY for process 2; dW back, and dX for layer 0. */
    ck_assert_double_eq(d.report.messages, 6);
    ck_assert_double_eq(d.report.bytes, 4 + 4 + 16 + 8 + 16 + 4);
}

TEST(groups_take_what_is_counted_by_hand) {
    two_stages(OF_PIPELINE_GPIPE);
    d.p.micro_batches = 3;
    run();
    check_time(OF_TASK_FORWARD, 1, 2, 12, 16);
    check_time(OF_TASK_WEIGHT_GRADIENT, 1, 2, 44, 49);
    check_time(OF_TASK_UPDATE, 1, 2, 49, 50);
    check_time(OF_TASK_UPDATE, 0, 2, 49, 50); /* X1.2 ends at 44, 2 for dX, 3 for dW */
    two_stages(OF_PIPELINE_REPLICATED);
    d.places[0].replicas = 2;
    d.places[1] = (of_pipeline_place){2, 2, 2, OF_NO_PROCESS, 0, 1};
    d.batches = 2;
    run();
    check_time(OF_TASK_FORWARD, 0, 0, 0, 2);
    check_time(OF_TASK_FORWARD, 0, 1, 0, 2);
    check_time(OF_TASK_FORWARD, 1, 1, 20, 24);
    check_time(OF_TASK_WEIGHT_GRADIENT, 0, 1, 32, 35);
    check_time(OF_TASK_UPDATE, 0, 1, 40, 41); /* two messages of 6 bytes */
    check_time(OF_TASK_UPDATE, 0, 0, 40, 41); /* waits for the other */
}

/* Two processes have layer 0 by turns, one has layer 1. */
TEST(a_replica_without_a_batch_in_the_last_group_updates_as_the_other_does) {
    two_stages(OF_PIPELINE_REPLICATED);
    d.places[0].replicas = 2;
    d.places[1] = (of_pipeline_place){2, 2, 2, OF_NO_PROCESS, 0, 1};
    d.batches = 1;
    run();
    ck_assert_uint_eq(d.n, 2 + 2 + 4);                 /* F and dW, both U; layer 1 */
    check_time(OF_TASK_WEIGHT_GRADIENT, 0, 0, 16, 19); /* dY is there 2 after X1.0 */
    check_time(OF_TASK_UPDATE, 0, 0, 24, 25);          /* two messages of 6 bytes */
    check_time(OF_TASK_UPDATE, 0, 1, 24, 25);          /* on process 1 */
    ck_assert_uint_eq(violations(), 0);
    for (size_t k = 0; k < d.n; k++)
        if (d.tasks[k].kind == OF_TASK_UPDATE && d.tasks[k].batch == 1)
            d.tasks[k] = d.tasks[--d.n];
    ck_assert_uint_gt(violations(), 0);
}

/* Four stages whose F, dX and dW take a second, behind a first layer that takes none, so that all
 * have a dX; eight micro-batches. */
static void four_stages(of_strategy strategy, double latency) {
    fresh();
    d.p = (of_pipeline){strategy, 4, 8, 0, 0, d.layers, d.places, 5};
    d.batches = 8;
    d.link = (of_network_link){latency, 0};
    for (size_t i = 0; i < 5; i++) {
        const int32_t on = i ? (int32_t)i - 1 : 0;
        d.layers[i] = (of_pipeline_layer){i > 0, i > 0, i > 0, 0, 4, 4, 4, 0, false};
        d.places[i] = (of_pipeline_place){on, on, on, OF_NO_PROCESS, 0, 1};
    }
}

/* As one backward pass of a stage, whose message leaves at its end. */
static void put_dw_before_dx(void) {
    for (size_t k = 0; k + 1 < d.n; k++) {
        of_pipeline_task *dx = &d.tasks[k], *dw = dx + 1;
        if (dx->kind != OF_TASK_INPUT_GRADIENT || dw->kind != OF_TASK_WEIGHT_GRADIENT ||
            dx->layer != dw->layer)
            continue;
        const of_pipeline_task first = *dx;
        *dx = *dw;
        *dw = first;
    }
}

static double makespan(of_strategy strategy, double latency, size_t in_flight, bool whole) {
    four_stages(strategy, latency);
    d.p.in_flight = in_flight;
    schedule();
    if (whole)
        put_dw_before_dx();
    simulate();
    ck_assert_uint_eq(violations(), 0);
    if (in_flight)
        ck_assert_uint_le(d.report.in_flight, in_flight);
    return d.report.makespan;
}

TEST(fast_forward_fills_the_bubbles_of_gpipe) {
    ck_assert_double_eq(makespan(OF_PIPELINE_GPIPE, 0, 0, true), 33);
    ck_assert_double_eq(makespan(OF_PIPELINE_GPIPE, 0, 0, false), 30); /* dX is sent first */
    ck_assert_double_eq(makespan(OF_PIPELINE_1F1B_FLUSH, 0, 0, true), 33);
    ck_assert_double_eq(makespan(OF_PIPELINE_FAST_FORWARD, 0, 4, false), 29);
    ck_assert_double_eq(makespan(OF_PIPELINE_FAST_FORWARD, 0, 5, false), 27); /* 1.22 times */
    const double gpipe = makespan(OF_PIPELINE_GPIPE, 0.1, 0, true);
    ck_assert_double_ge(gpipe, 1.12 * makespan(OF_PIPELINE_FAST_FORWARD, 0.1, 5, false));
    ck_assert_double_ge(gpipe, 1.20 * makespan(OF_PIPELINE_FAST_FORWARD, 0.1, 8, false));
}

TEST(batches_in_flight_hold_inputs_and_gradients) {
    four_stages(OF_PIPELINE_GPIPE, 0);
    run();
    ck_assert_uint_eq(d.report.in_flight, 8);
    ck_assert_double_eq(d.report.held_bytes, 8 * 8 + 4); /* of two layers, and one dY */
    four_stages(OF_PIPELINE_1F1B_FLUSH, 0);
    run();
    ck_assert_uint_eq(d.report.in_flight, 4);
}

TEST(the_period_is_the_load_of_the_slowest_where_messages_cost_nothing) {
    for (int k = 0; k < 300; k++) {
        double largest;
        draw(1);
        d.link = (of_network_link){0, 0};
        d.batches = 90;
        set_strategy((of_strategy)(OF_PIPELINE_1F1B + random_below(4)));
        OK(of_pipeline_place_layers(&d.p, &d.link, d.places, &largest));
        run();
        if (d.p.strategy != OF_PIPELINE_REPLICATED) /* replicas wait for each other */
            ck_assert_double_eq_tol(d.report.period, largest, 1e-9 * largest);
        else
            ck_assert_double_ge(d.report.period, largest * (1 - 1e-9));
    }
}

TEST(schedules_that_cannot_run_are_refused_and_not_written) {
    two_stages(OF_PIPELINE_1F1B);
    run();
    const of_pipeline_task first = d.tasks[0];
    of_pipeline_task *tasks = d.tasks, saved;
#define REFUSED(change, why)                                                                       \
    do {                                                                                           \
        of_pipeline_report report = {.makespan = 77};                                              \
        saved = tasks[1];                                                                          \
        change;                                                                                    \
        ck_assert_int_eq(of_pipeline_simulate(&d.p, &d.link, d.batches, d.tasks, d.n, &report),    \
                         OF_INVALID);                                                              \
        ck_assert_msg(strstr(of_error_message(), why) != NULL, "%s", of_error_message());          \
        ck_assert(report.makespan == 77 && memcmp(tasks, &first, sizeof first) == 0);              \
        tasks[1] = saved;                                                                          \
    } while (0)
    REFUSED(tasks[1].kind = 5, "task 1 of a schedule (kind 5");
    REFUSED(tasks[1].kind = -1, "unknown");
    REFUSED(tasks[1].kind = OF_TASK_SECOND_INPUT_GRADIENT, "unknown");
    REFUSED(tasks[1].layer = 2, "unknown");
    REFUSED(tasks[1].layer = -1, "unknown");
    REFUSED(tasks[1].batch = 3, "unknown");
    REFUSED(tasks[1].batch = INT32_MIN, "unknown");
    REFUSED(tasks[1].process = 1, "misplaced");
    REFUSED(tasks[1] = tasks[0], "doubled");
    saved = tasks[0];
    tasks[0] = tasks[2]; /* dW before its F */
    tasks[2] = saved;
    of_pipeline_report report;
    INVALID(of_pipeline_simulate(&d.p, &d.link, 3, tasks, d.n, &report), "");
    ck_assert_ptr_nonnull(strstr(of_error_message(), "waits forever before the weight gradient of "
                                                     "layer 0, batch 0"));
    INVALID(of_pipeline_simulate(&d.p, NULL, 3, tasks, d.n, &report), "");
    INVALID(of_pipeline_simulate(&d.p, &d.link, 0, tasks, d.n, &report), "");
    INVALID(of_pipeline_simulate(&d.p, &d.link, 3, NULL, d.n, &report), "");
    INVALID(of_pipeline_simulate(&d.p, &d.link, 3, tasks, d.n, NULL), "");
    INVALID(of_pipeline_simulate(NULL, &d.link, 3, tasks, d.n, &report), "");
}
