/* SPDX-License-Identifier: BSD-3-Clause */
/* The verifier of pipelines catches every mutant of a right schedule, and survives anything. */
#include <math.h>
#include <stdio.h>

#include "random_pipeline.h"

enum { PLANS = 600, LEAST = 40, MALFORMED = 20000 };

/* A mutant: changes a simulated schedule so that it is wrong for certain; false: this one offers
 * nothing to change. `k`: a task of it. */
typedef bool (*mutation)(size_t k);

static bool dropped(size_t k) {
    memmove(&d.tasks[k], &d.tasks[k + 1], (d.n - k - 1) * sizeof *d.tasks);
    d.n--;
    return true;
}

static void move_to(of_pipeline_task *task, double start) {
    task->end = start + (task->end - task->start);
    task->start = start;
}

/* When all is over, so that nothing is in the way. */
static bool doubled(size_t k) {
    d.tasks[d.n] = d.tasks[k];
    move_to(&d.tasks[d.n++], d.report.makespan + 1);
    return true;
}

static bool unknown_beside_the_others(size_t k) {
    doubled(k);
    d.tasks[d.n - 1].batch = (int32_t)d.batches;
    return true;
}

static bool on_another_process(size_t k) {
    const size_t by = 1 + random_below(d.p.processes);
    d.tasks[k].process = (int32_t)(((size_t)d.tasks[k].process + by) % (d.p.processes + 1));
    return true;
}

static bool of_another_kind(size_t k) {
    d.tasks[k].kind = (d.tasks[k].kind + 1 + (int32_t)random_below(OF_TASK_KINDS)) % 6;
    return true;
}

static bool of_another_layer(size_t k) {
    d.tasks[k].layer =
        (int32_t)(((size_t)d.tasks[k].layer + 1 + random_below(d.p.n)) % (d.p.n + 1));
    return true;
}

static bool of_another_batch(size_t k) {
    d.tasks[k].batch =
        (int32_t)(((size_t)d.tasks[k].batch + 1 + random_below(d.batches)) % (d.batches + 1));
    return true;
}

static bool too_short(size_t k) {
    d.tasks[k].end -= 0.01;
    return true;
}

static bool too_long(size_t k) {
    d.tasks[k].end += 0.01;
    return true;
}

static bool at_no_time(size_t k) {
    static const double times[] = {NAN, INFINITY, -INFINITY, -1};
    d.tasks[k].start = times[random_below(4)];
    if (random_below(2))
        d.tasks[k].end = d.tasks[k].start;
    return true;
}

/* The next one of the same process; d.n: there is none. */
static size_t next_there(size_t k) {
    size_t next = k + 1;
    while (next < d.n && d.tasks[next].process != d.tasks[k].process)
        next++;
    return next;
}

static bool at_the_time_of_the_next(size_t k) {
    const size_t next = next_there(k);
    if (next >= d.n)
        return false;
    move_to(&d.tasks[k], d.tasks[next].start);
    return true;
}

static bool swapped_with_the_next(size_t k) {
    const size_t next = next_there(k);
    if (next >= d.n)
        return false;
    const of_pipeline_task task = d.tasks[k];
    d.tasks[k] = d.tasks[next];
    d.tasks[next] = task;
    return true;
}

static size_t find(int kind, int32_t layer, int32_t batch) {
    size_t k = 0;
    while (k < d.n &&
           (d.tasks[k].kind != kind || d.tasks[k].layer != layer || d.tasks[k].batch != batch))
        k++;
    return k;
}

/* Half-way through the time of what it needs, or of the message with that. */
static bool before_what_it_needs(size_t k) {
    of_pipeline_task *t = &d.tasks[k];
    size_t needed = d.n;
    if (t->kind == OF_TASK_FORWARD)
        needed = find(OF_TASK_FORWARD, t->layer - 1, t->batch);
    else if (t->kind == OF_TASK_UPDATE)
        needed = find(OF_TASK_WEIGHT_GRADIENT, t->layer, t->batch);
    else if (random_below(2))
        needed = find(OF_TASK_FORWARD, t->layer, t->batch);
    else if ((size_t)t->layer + 1 < d.p.n)
        needed = find(OF_TASK_INPUT_GRADIENT + (int)random_below(2), t->layer + 1, t->batch);
    if (needed == d.n)
        return false;
    const of_pipeline_task *n = &d.tasks[needed];
    const bool has_message = n->process != t->process && d.link.latency > 0;
    move_to(t,
            has_message && random_below(2) ? n->end + d.link.latency / 2 : (n->start + n->end) / 2);
    return true;
}

static void reinsert(size_t from, size_t to) {
    const of_pipeline_task task = d.tasks[from];
    if (from < to)
        memmove(&d.tasks[from], &d.tasks[from + 1], (to - from) * sizeof task);
    else
        memmove(&d.tasks[to + 1], &d.tasks[to], (from - to) * sizeof task);
    d.tasks[to] = task;
}

/* Runs the changed order; one that can't run is no mutant for the verifier. */
static bool runs(void) {
    return of_pipeline_simulate(&d.p, &d.link, d.batches, d.tasks, d.n, &d.report) == OF_OK;
}

/* The forward, `groups` groups later and on the same process, of the update k; d.n: none. */
static size_t forward_after(size_t k, size_t groups) {
    const of_pipeline_task *update = &d.tasks[k];
    const size_t size = of_pipeline_group(&d.p, (size_t)update->layer);
    const size_t batch = ((size_t)update->batch / size + groups) * size +
                         (d.places[update->layer].replicas > 1 ? (size_t)update->batch % size : 0);
    return update->kind == OF_TASK_UPDATE ? find(OF_TASK_FORWARD, update->layer, (int32_t)batch)
                                          : d.n;
}

/* Runs the order with one task moved to the place of another, if it is not there already. */
static bool runs_with(size_t from, size_t to, bool is_there) {
    if (from == d.n || to == d.n)
        return false;
    if (!is_there)
        reinsert(from, to);
    return runs();
}

/* The first forward that has to see it runs before it. */
static bool updated_late(size_t k) {
    const size_t seeing = forward_after(k, d.delays[d.tasks[k].layer] + 1);
    return runs_with(k, seeing, seeing < k);
}

/* The last forward that may not see it runs after it. */
static bool updated_early(size_t k) {
    const size_t unseeing = forward_after(k, d.delays[d.tasks[k].layer]);
    return runs_with(unseeing, k, unseeing > k);
}

/* The next update of the same layer and process; d.n: there is none, or k is no update. */
static size_t update_after(size_t k) {
    size_t next = d.tasks[k].kind == OF_TASK_UPDATE ? k + 1 : d.n;
    while (next < d.n &&
           (d.tasks[next].kind != OF_TASK_UPDATE || d.tasks[next].layer != d.tasks[k].layer ||
            d.tasks[next].process != d.tasks[k].process))
        next++;
    return next;
}

static bool updated_in_another_order(size_t k) {
    const size_t next = update_after(k);
    if (next == d.n)
        return false;
    const int32_t batch = d.tasks[k].batch;
    d.tasks[k].batch = d.tasks[next].batch;
    d.tasks[next].batch = batch;
    return true;
}

/* At the end of a run no forward would see the difference. */
static bool updated_after_the_next(size_t k) {
    return runs_with(k, update_after(k), false);
}

/* One of the gradients that share an update is added after the next. */
static bool added_in_another_order(size_t k) {
    const of_pipeline_task *task = &d.tasks[k];
    const size_t group = d.p.micro_batches;
    if (task->kind != OF_TASK_WEIGHT_GRADIENT || ((size_t)task->batch + 1) % group == 0)
        return false;
    return runs_with(k, find(OF_TASK_WEIGHT_GRADIENT, task->layer, task->batch + 1), false);
}

/* The schedule of one more batch in flight. */
static bool begun_too_soon(size_t k) {
    (void)k;
    if (!d.p.in_flight || d.report.in_flight < 2)
        return false;
    d.p.in_flight = d.report.in_flight - 1;
    return true;
}

static bool with_another_delay(size_t k) {
    const size_t layer = (size_t)d.tasks[k].layer;
    const size_t groups = (d.batches - 1) / of_pipeline_group(&d.p, layer);
    if (!d.layers[layer].weight_bytes || groups <= d.delays[layer])
        return false;
    const bool less = d.delays[layer] && random_below(2);
    if (less)
        d.delays[layer]--;
    else
        d.delays[layer]++;
    return true;
}

static const struct {
    const char *name;
    mutation of;
} mutants[] = {
    {"dropped", dropped},
    {"doubled", doubled},
    {"unknown, beside the others", unknown_beside_the_others},
    {"on another process", on_another_process},
    {"of another kind", of_another_kind},
    {"of another layer", of_another_layer},
    {"of another batch", of_another_batch},
    {"too short", too_short},
    {"too long", too_long},
    {"at no time", at_no_time},
    {"at the time of the next", at_the_time_of_the_next},
    {"swapped with the next", swapped_with_the_next},
    {"before what it needs", before_what_it_needs},
    {"updated late", updated_late},
    {"updated early", updated_early},
    {"updated in another order", updated_in_another_order},
    {"updated after the next", updated_after_the_next},
    {"added in another order", added_in_another_order},
    {"begun too soon", begun_too_soon},
    {"with another delay", with_another_delay},
};

/* From any task on, at the first that offers something to change. */
static bool mutate(mutation mutant) {
    const drawn right = d;
    const size_t first = random_below(d.n);
    of_pipeline_task *saved = calloc(d.n, sizeof *saved);
    bool changed = false;
    ck_assert_ptr_nonnull(saved);
    memcpy(saved, d.tasks, d.n * sizeof *saved);
    for (size_t k = 0; k < right.n && !changed; k++) {
        changed = mutant((first + k) % right.n);
        if (!changed)
            memcpy(d.tasks, saved, right.n * sizeof *saved);
    }
    free(saved);
    return changed;
}

TESTS(every_mutant_is_caught, LENGTH(mutants)) {
    size_t caught = 0;
    for (int i = 0; i < PLANS; i++) {
        draw(1);
        ck_assert_uint_eq(violations(), 0);
        if (mutate(mutants[row].of)) {
            ck_assert_msg(violations() > 0, "plan %d: a task %s was not caught", i,
                          mutants[row].name);
            caught++;
        }
    }
    printf("%zu mutants caught: a task %s\n", caught, mutants[row].name);
    ck_assert_msg(caught >= LEAST, "%zu mutants: a task %s", caught, mutants[row].name);
}

/* Each task of a simulated schedule begins as soon as it can, so that a rule is broken by any that
 * begins sooner: that of the need, or of the process, for which it waits. */
TEST(every_task_that_begins_too_early_is_caught) {
    size_t moved = 0;
    for (int i = 0; i < PLANS; i++) {
        draw(1);
        for (size_t k = 0; k < d.n; k++) {
            const of_pipeline_task saved = d.tasks[k];
            if (saved.start == 0)
                continue;
            move_to(&d.tasks[k], saved.start - 0.01);
            ck_assert_msg(violations() > 0, "plan %d, kind %d, layer %d, batch %d", i, saved.kind,
                          saved.layer, saved.batch);
            d.tasks[k] = saved;
            moved++;
        }
    }
    ck_assert_uint_gt(moved, 50 * PLANS);
}

static uint64_t random_bits(void) {
    return random_below(1u << 31) << 33 ^ random_below(1u << 31) << 16 ^ random_below(1u << 31);
}

/* Small numbers, and any. */
static int32_t random_number(void) {
    return random_below(3) ? (int32_t)random_below(8) - 2 : (int32_t)(uint32_t)random_bits();
}

static double random_time(void) {
    static const double times[] = {NAN, INFINITY, -INFINITY, -1, 0, 1e308, 5e-324, 3};
    double time;
    const uint64_t bits = random_bits();
    memcpy(&time, &bits, sizeof time);
    return random_below(2) ? times[random_below(8)] : time;
}

TEST(malformed_schedules_are_counted_and_nothing_else_happens) {
    do
        draw(1);
    while (d.n < 40);
    const size_t n = d.n;
    of_pipeline_task *right = d.tasks;
    for (int i = 0; i < MALFORMED; i++) {
        d.n = random_below(n + 2);
        d.tasks = calloc(d.n + 1, sizeof *d.tasks); /* its own: a reader past it is seen */
        ck_assert_ptr_nonnull(d.tasks);
        memcpy(d.tasks, right, (d.n < n ? d.n : n) * sizeof *d.tasks);
        for (size_t k = 0; k < d.n; k++)
            if (random_below(2))
                d.tasks[k] = (of_pipeline_task){random_number(), random_number(), random_number(),
                                                random_number(), random_time(),   random_time()};
        const size_t found = violations();
        ck_assert_msg(found > 0 && found < 100 * n, "%zu violations", found);
        free(d.tasks);
    }
    d.tasks = right;
}

TEST(malformed_places_are_refused_or_verified) {
    size_t accepted = 0;
    do
        draw(1);
    while (d.p.strategy != OF_PIPELINE_LAYERPIPE || d.p.n < 4 || d.p.processes < 3);
    const drawn right = d;
    for (int i = 0; i < MALFORMED; i++) {
        memcpy(d.places, right.places, sizeof d.places);
        d.places[random_below(d.p.n)] =
            (of_pipeline_place){random_number(), random_number(),           random_number(),
                                random_number(), (uint32_t)random_number(), random_number()};
        if (of_pipeline_check(&d.p) != OF_OK)
            continue;
        accepted++;
        violations();
    }
    ck_assert_uint_lt(accepted, MALFORMED / 2);
}

TEST(tasks_that_are_missing_are_violations) {
    draw(1);
    ck_assert_uint_ge(count_violations(&d.p, &d.link, d.delays, d.batches, NULL, 0), d.n);
}
