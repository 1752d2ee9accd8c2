/* SPDX-License-Identifier: BSD-3-Clause */
/* Out of memory: each allocation of the core fails in turn. The failure is
 * reported, nothing has changed, and the call works when repeated. The linker
 * puts the functions below in place of malloc() and its like; the fake host
 * allocates by another way. */
#include <stdlib.h>

#include "fake_device.h"
#include "planners/kfac/factors.h"
#include "planners/kfac/messages.h"
#include "planners/reorder/reorder.h"

static int until_failure = -1; /* allocations that still succeed; -1: all */
static int in_a_row = 1;       /* failures then */
static bool failed;

static bool fails_now(void) {
    if (until_failure < 0)
        return false;
    if (until_failure-- > 0)
        return false;
    failed = true;
    if (--in_a_row > 0)
        until_failure = 0;
    else
        in_a_row = 1;
    return true;
}

/* Blocks that the core has allocated since tracking began and not freed. */
enum { MAX_LIVE = 1024 };
static void *live[MAX_LIVE];
static size_t n_live;
static bool tracking;

static void *track(void *memory) {
    if (tracking && memory && n_live < MAX_LIVE)
        live[n_live++] = memory;
    return memory;
}

static void untrack(const void *memory) {
    for (size_t i = n_live; i-- > 0;)
        if (live[i] == memory) {
            live[i] = live[--n_live];
            return;
        }
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t n, size_t size);
void *__real_realloc(void *old, size_t size);
void __real_free(void *memory);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_realloc(void *old, size_t size);
void __wrap_free(void *memory);

void *__wrap_malloc(size_t size) {
    return fails_now() ? NULL : track(__real_malloc(size));
}

void *__wrap_calloc(size_t n, size_t size) {
    return fails_now() ? NULL : track(__real_calloc(n, size));
}

void *__wrap_realloc(void *old, size_t size) {
    if (fails_now())
        return NULL;
    untrack(old);
    return track(__real_realloc(old, size));
}

void __wrap_free(void *memory) {
    untrack(memory);
    __real_free(memory);
}

/* Lets the nth allocation of a call fail. */
#define WITH_FAILURE(n, status, call)                                                              \
    do {                                                                                           \
        until_failure = (n);                                                                       \
        failed = false;                                                                            \
        (status) = (call);                                                                         \
        until_failure = -1;                                                                        \
    } while (0)
#define RUNS_OUT(n, call, words)                                                                   \
    do {                                                                                           \
        of_status status;                                                                          \
        WITH_FAILURE(n, status, call);                                                             \
        FAILS(OF_NO_MEMORY, status, words);                                                        \
    } while (0)
#define WORKS_WITH_FAILURE(n, call)                                                                \
    do {                                                                                           \
        of_status status;                                                                          \
        WITH_FAILURE(n, status, call);                                                             \
        OK(status);                                                                                \
    } while (0)

/* Must come first: the registry's table is made once in a process. */
FORWARD(update_that_finds_no_room_in_the_registry_is_launched_at_once) {
    add_some(f, 5, 5);
    backward_expected(f);
    in_a_row = 2; /* for all together, and for the first of them by itself */
    WORKS_WITH_FAILURE(5, of_plan_step(f->plan, NULL, 0, NULL));
    ck_assert(failed);
    ck_assert_uint_eq(counts(f).at_once, 1);
    ck_assert_uint_eq(counts(f).pending, 4);
}

TEST(plan_reports_it) {
    fake_host *host = fake_host_new();
    of_plan *plan = NULL;
    RUNS_OUT(0, of_plan_create(&host->table, "adam", NULL, &plan), "out of memory for a plan");
    ck_assert_ptr_null(plan);
    fake_host_free(host);
}

FORWARD(group_and_slot_report_it) {
    RUNS_OUT(0, of_plan_set_group(f->plan, 2, f->hyper[0], 8), "out of memory");
    fake_tensor *tensor = fake_tensor_new(f->host, OF_FLOAT32, 1, 2);
    tensor->owned = true;
    RUNS_OUT(0, of_plan_add_slot(f->plan, tensor, 0, false, NULL), "out of memory");
    ck_assert_int_eq(tensor->drops, 1);
    pending(f, 10);
}

TESTS(step_reports_it, 20) {
    fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
    add_some(f, 20, 5);
    backward_all(f);
    RUNS_OUT(row, of_plan_step(f->plan, NULL, 0, NULL), "out of memory for an update");
    ck_assert_int_eq(atomic_load(&f->host->holds), 0);
    ck_assert_uint_eq(counts(f).created, 0);
    step(f);
    teardown(f);
}

BACKWARD(gradient_reports_it, 0) {
    twin *t = add(f, OF_SERIAL_ELEMENTS);
    of_pass *pass = NULL;
    bool first = false;
    backward(t);
    RUNS_OUT(0, of_pass_begin(f->plan, 7, &pass, &first), "out of memory");
    ck_assert(!pass && !first);
    f->pass = begin_pass(f);
    RUNS_OUT(2, ready(f, t->slot), "out of memory"); /* behind what it waits in, twice */
    ck_assert_int_eq(atomic_load(&f->host->holds), 0);
    expect_update(f, t);
    OK(ready(f, t->slot));
    ck_assert(launched(t));
}

/* A gradient that finds no room to wait is updated at once. */
BACKWARD(a_gradient_that_finds_no_room_does_not_wait, 0) {
    twin *t = add(f, 10);
    f->pass = begin_pass(f);
    backward(t);
    expect_update(f, t);
    WORKS_WITH_FAILURE(0, ready(f, t->slot));
    ck_assert(failed && launched(t));
}

/* Where a launch leaves nothing in flight, the device must have done it. */
TESTS(launch_without_room_for_its_stream_waits_for_the_device, 2) {
    const bool broken = row != 0;
    fixture *f = setup_on_device(OF_FORWARD, OF_BUCKET_NONE);
    twin *t = scaled_on_device(f, 10);
    of_accessed touched;
    device.fails_to_record = broken;
    WITH_FAILURE(0, touched, of_access(t->tensor->grad, false));
    ck_assert_int_eq(touched, broken ? OF_ACCESS_FAILED : OF_IN_FLIGHT);
    ck_assert_int_eq(device.launches, 1);
    ck_assert_int_eq(device.synchronized, !broken);
    ck_assert_uint_eq(counts(f).in_flight, 0);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), broken ? OF_REFUSED : OF_OK);
    expect_no_race();
    fake_buffer_release(t->tensor->factor);
    teardown_unchecked(f);
}

/* Without Check in between: its allocations would be tracked. */
static size_t left_behind(fake_host *host, of_mode mode) {
    static const double hyper[] = {1e-2, 0.9, 0.999, 1e-8, 0, 0, 0, 1};
    of_plan_options options = {.struct_size = sizeof options, .mode = mode};
    of_plan *plan;
    n_live = 0;
    tracking = true;
    of_plan_create(&host->table, "adam", &options, &plan);
    of_plan_set_group(plan, 0, hyper, 8);
    for (int i = 0; i < host->n_tensors; i++)
        of_plan_add_slot(plan, &host->tensors[i], 0, false, NULL);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < host->n_tensors; i++)
            fake_set_grad(&host->tensors[i], i ? fake_buffer_new(40) : NULL);
        of_pass *pass = NULL;
        bool first;
        size_t at;
        if (mode == OF_BACKWARD && of_pass_begin(plan, (of_token)round + 1, &pass, &first) == OF_OK)
            for (size_t i = 0; i < 20; i++)
                of_pass_ready(pass, i, &at);
        of_pass_release(pass); /* some have not ended */
        fake_use(host->tensors[round].param, round == 1);
        of_plan_step(plan, NULL, 0, NULL);
        fake_use(host->tensors[round].state[0], false);
    }
    of_plan_retain(plan);
    of_plan_release(plan);
    of_plan_release(plan);
    tracking = false;
    return n_live;
}

TESTS(plan_gives_all_its_memory_back, 2) {
    fake_host *host = fake_host_new();
    host->consumes = row == OF_BACKWARD;
    for (int i = 0; i < 20; i++) {
        fake_tensor *tensor = fake_tensor_new(host, OF_FLOAT32, 10, 2);
        tensor->owned = true;
        tensor->shared = i % 4 == 0;
    }
    ck_assert_uint_eq(left_behind(host, (of_mode)row), 0);
    fake_host_free(host);
}

FORWARD(repeated_steps_allocate_nothing) {
    add_some(f, 20, 50);
    train(f);
    for (int i = 0; i < 10; i++) {
        backward_expected(f);
        WORKS_WITH_FAILURE(0, of_plan_step(f->plan, NULL, 0, NULL));
        ck_assert_msg(!failed, "step() allocated");
    }
}

/* Each allocation of a function fails in turn, until none does. */
#define FAILS_IN_TURN(call)                                                                        \
    do {                                                                                           \
        of_status status = OF_NO_MEMORY;                                                           \
        int n = 0;                                                                                 \
        for (; status != OF_OK; n++) {                                                             \
            WITH_FAILURE(n, status, call);                                                         \
            ck_assert_int_eq(status, failed ? OF_NO_MEMORY : OF_OK);                               \
            ck_assert(!failed || strstr(of_error_message(), "out of memory for "));                \
            ck_assert(n_live == 0);                                                                \
        }                                                                                          \
        ck_assert_int_gt(n, 1);                                                                    \
    } while (0)

static const of_layer_work layers[] = {{.input_bytes = 1, .weight_bytes = 1},
                                       {.weight_gradient = 1, .weight_bytes = 1}};
static const uint32_t places[] = {1, 0};
static const of_network network = {.link = {.latency = 1}};
static const double ready_at[] = {0, 1};
static const uint64_t message_bytes[] = {1, 1};
static const uint32_t factor_sizes[] = {2, 3};

static of_status fuse(of_fusion how, double processor, uint32_t *group, size_t *n_groups) {
    return of_fuse_messages(how, ready_at, message_bytes, 2, &network.link, processor,
                            how == OF_FUSION_PLANNED ? 0 : 1, group, n_groups);
}

static of_status place(int32_t *owner, double *load) {
    return of_place_inverses(OF_PLACEMENT_BALANCED, factor_sizes, 2, 2, 0, owner, load);
}

static of_status make_factors(void) {
    static const size_t elements[] = {1, 3};
    static const uint32_t order[] = {0, 1};
    const of_factors_host none = {.struct_size = sizeof none};
    of_factors *made = NULL;
    of_status status = of_factors_create(elements, 2, &none, &made);
    if (status == OF_OK)
        status = of_factors_arrange(made, order, order);
    of_factors_destroy(made);
    return status;
}

TEST(planners_report_it) {
    of_reorder_times times;
    uint64_t bytes;
    uint32_t group[2];
    int32_t owner[2];
    double load[2];
    size_t found;
    n_live = 0;
    tracking = true;
    FAILS_IN_TURN(of_reorder_is_valid(places, 2) ? OF_OK : OF_NO_MEMORY);
    FAILS_IN_TURN(of_reorder_peak_bytes(layers, 2, places, &bytes));
    FAILS_IN_TURN(of_reorder_simulate(layers, 2, places, &network, true, &times));
    FAILS_IN_TURN(of_reorder_best_k(layers, 2, &network, true, 9, &found, &times));
    FAILS_IN_TURN(fuse(OF_FUSION_PLANNED, 0, group, &found));
    FAILS_IN_TURN(fuse(OF_FUSION_PLANNED, 1, group, &found));
    FAILS_IN_TURN(place(owner, load));
    FAILS_IN_TURN(make_factors());
    tracking = false;
}

TEST(plans_of_factors_that_fail_write_nothing) {
    uint32_t group[] = {71, 72};
    int32_t owner[] = {73, 74};
    double load[] = {75, 76};
    size_t n_groups = 77;
    for (of_fusion how = OF_FUSION_EACH; how <= OF_FUSION_PLANNED; how++)
        RUNS_OUT(how == OF_FUSION_PLANNED, fuse(how, 0, group, &n_groups), "out of memory");
    for (int n = 0; n < 2; n++)
        RUNS_OUT(n, place(owner, load), "out of memory");
    ck_assert(group[0] == 71 && group[1] == 72 && n_groups == 77);
    ck_assert(owner[0] == 73 && owner[1] == 74 && load[0] == 75 && load[1] == 76);
}
