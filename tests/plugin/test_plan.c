/* SPDX-License-Identifier: BSD-3-Clause */
/* Plans: what is refused and how it is said, ownership, the end of a plan. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "fixture.h"

__attribute__((constructor)) static void log_to_hosts_only(void) {
    setenv("OPTFUSE_LOG", "error", 1); /* for stderr: a host gets all messages */
}

static of_status create(const of_host *host, const char *rule, const of_plan_options *options) {
    of_plan *plan = (of_plan *)&plan;
    of_status status = of_plan_create(host, rule, options, &plan);
    if (status != OF_OK)
        ck_assert_ptr_null(plan);
    of_plan_release(plan);
    return status;
}

/* Functions of optional tables. */
static bool awaits(const void *key) {
    return key != NULL;
}
static const void *begins(const void *key, const void **grad) {
    return *grad = key;
}
static void ends(const void *key) {
    (void)key;
}

TEST(bad_hosts_rules_and_options_are_refused) {
    fake_host *host = fake_host_new();
    const char *rule, *words;
    of_host table;
    of_backward_host backward;
    of_scaling_host scaling;
    of_plan_options options;
    char abi[80];
    snprintf(abi, sizeof abi, "ABI version %d, this library has %d", OF_ABI_VERSION + 1,
             OF_ABI_VERSION);
    ck_assert_uint_eq(of_abi_version(), OF_ABI_VERSION);
#define CREATED(change, expected)                                                                  \
    do {                                                                                           \
        table = host->table;                                                                       \
        backward = *table.backward;                                                                \
        scaling = *table.scaling;                                                                  \
        table.backward = &backward;                                                                \
        table.scaling = &scaling;                                                                  \
        options = (of_plan_options){.struct_size = sizeof options};                                \
        rule = "adam";                                                                             \
        change;                                                                                    \
        words = expected;                                                                          \
        if (words)                                                                                 \
            INVALID(create(&table, rule, &options), words);                                        \
        else                                                                                       \
            OK(create(&table, rule, &options));                                                    \
    } while (0)
    CREATED(rule = "lbfgs", "unknown rule 'lbfgs'; known: adam, sgd, rmsprop, ");
    CREATED(rule = NULL, "rule");
    CREATED(table.abi_version++, abi);
    CREATED(table.struct_size -= 8, "of_host has");
    CREATED(table.settle = NULL, "not optional");
    CREATED((table.log = NULL, table.prefetch = NULL), NULL);
    CREATED(backward.struct_size -= 8, "the host's of_backward_host has");
    CREATED(scaling.keep = NULL,
            "a function of the host's of_scaling_host that is not optional is NULL");
    CREATED((table.scaling = NULL, table.backward = NULL), NULL);
    CREATED((table.backward = NULL, options.mode = OF_BACKWARD), "of_backward_host");
    const of_await_host half_await = {.struct_size = sizeof half_await, .await = awaits},
                        small_await = {8, awaits, awaits};
    const of_product_host half_product = {sizeof half_product, .begin = begins, .end = ends},
                          small_product = {.struct_size = 8};
    CREATED(table.await = &half_await, "of_await_host that is not optional is NULL");
    CREATED(table.await = &small_await, "the host's of_await_host has");
    CREATED(table.product = &half_product, "of_product_host that is not optional is NULL");
    CREATED(table.product = &small_product, "the host's of_product_host has");
    CREATED(rule = "sgd", NULL);
    CREATED(options.struct_size = 8, "of_plan_options has 8 bytes");
    CREATED(options.mode = (of_mode)(OF_FINAL + 1), "unknown mode, reference or ISA");
    CREATED(options.isa = OF_ISA_COUNT, "unknown mode, reference or ISA");
    CREATED(options.reference = OF_REF_COUNT, "unknown mode, reference or ISA");
    fake_host_free(host);
}

TEST(isa_is_at_most_the_one_asked_for) {
    fake_host *host = fake_host_new();
    of_plan *plan;
    OK(of_plan_create(&host->table, "adam", NULL, &plan));
    ck_assert_str_eq(of_plan_isa(plan, OF_FLOAT32), of_isa_name(of_isa_detect()));
    ck_assert_str_eq(of_plan_isa(plan, OF_DTYPE_COUNT), "none");
    of_plan_release(plan);
    of_plan_options options = {.struct_size = sizeof options, .isa = OF_ISA_BASELINE};
    OK(of_plan_create(&host->table, "adam", &options, &plan));
    ck_assert_str_eq(of_plan_isa(plan, OF_FLOAT32), "baseline");
    of_plan_release(plan);
    fake_host_free(host);
}

FORWARD(groups_need_the_rules_hyper_parameters_and_an_order) {
    ck_assert_str_eq(of_plan_rule(f->plan)->name, "adam");
    INVALID(of_plan_set_group(f->plan, 0, f->hyper[0], 3), "adam has 8 hyper-parameters, not 3");
    INVALID(of_plan_set_group(f->plan, 3, f->hyper[0], 8), "group 3: the plan has 2 groups");
    double found[OF_MAX_HYPER];
    of_plan_get_group(f->plan, 1, found);
    ck_assert_mem_eq(found, f->hyper[1], 8 * sizeof *found);
    of_plan_get_group(f->plan, 3, found);
    ck_assert_mem_eq(found, ((double[8]){0}), 8 * sizeof *found);
}

FORWARD(tensor_of_a_refused_slot_is_dropped) {
    fake_tensor *tensor = fake_tensor_new(f->host, OF_FLOAT32, 1, 2);
    tensor->owned = true;
    size_t slot = 77;
    INVALID(of_plan_add_slot(f->plan, tensor, 2, false, &slot),
            "a slot for group 2: the plan has 2 groups");
    ck_assert_uint_eq(slot, 77);
    ck_assert_int_eq(tensor->drops, 1);
}

FORWARD(unusable_inputs_are_refused_by_name) {
    add(f, 10);
    fake_tensor *tensor = add(f, 10)->tensor;
    const fake_tensor good = *tensor;
#define REFUSED(change, words)                                                                     \
    do {                                                                                           \
        change;                                                                                    \
        backward_all(f);                                                                           \
        if (tensor->dtype == OF_DTYPE_COUNT)                                                       \
            fake_set_grad(tensor, fake_buffer_new(40));                                            \
        INVALID(of_plan_step(f->plan, NULL, 0, NULL), words);                                      \
        ck_assert_int_eq(atomic_load(&f->host->holds), 0);                                         \
        ck_assert_uint_eq(counts(f).created, 0);                                                   \
        tensor->device = good.device, tensor->mixed = good.mixed, tensor->dtype = good.dtype;      \
        tensor->n_state = good.n_state, tensor->step = good.step;                                  \
    } while (0)
    REFUSED(tensor->device = OF_CUDA, "no kernel of 'adam' for float32 parameters on cuda");
    REFUSED(tensor->mixed = true,
            "no kernel of 'adam' for float32 parameters on cpu with bfloat16 state");
    REFUSED(tensor->n_state = 1, "the optimizer state 'exp_avg_sq' is missing");
    REFUSED(tensor->step = -1, "step 0 (first is 1)");
    REFUSED(tensor->dtype = OF_DTYPE_COUNT, "unknown dtype 4");
    train(f);
}

FORWARD(slots_grow_without_limit) {
    for (size_t i = 0; i < MAX_TWINS; i++)
        ck_assert_uint_eq(add(f, 3)->slot, i);
    train(f);
}

FORWARD(slots_can_be_added_while_updates_are_pending) {
    for (int i = 0; i < 40; i++) {
        add_to_group(f, 5, (size_t)i % 2);
        train(f);
    }
}

FORWARD(clear_launches_what_is_pending_and_drops_all) {
    add_some(f, 3, 100);
    train(f);
    of_plan_clear(f->plan);
    for (size_t i = 0; i < f->n; i++) {
        ck_assert(launched(&f->twins[i]));
        ck_assert_int_eq(f->twins[i].tensor->drops, 1);
    }
    ck_assert(!of_any_pending());
    step_only(f);
    OK(of_plan_set_group(f->plan, 0, f->hyper[0], 8));
    twin *t = add(f, 10);
    backward(t);
    expect_update(f, t);
    step_only(f);
}

BACKWARD(clear_forgets_unconfirmed_updates, OF_BUCKET_NONE) {
    gradient(f, add(f, 10));
    ck_assert(of_plan_unconfirmed(f->plan));
    of_plan_clear(f->plan);
    ck_assert(!of_plan_unconfirmed(f->plan));
}

WITH(last_release_launches_what_is_pending, setup(OF_FORWARD, OF_BUCKET_NONE), teardown_unchecked) {
    twin *t = pending(f, 100);
    of_plan_retain(f->plan);
    of_plan_release(f->plan);
    ck_assert(!launched(t));
    of_plan_release(f->plan);
    f->plan = NULL;
    ck_assert(launched(t) && !of_any_pending());
    ck_assert_int_eq(t->tensor->drops, 1);
}

FORWARD(counts_tell_where_updates_went) {
    add_some(f, 4, 10);
    f->twins[0].tensor->shared = true;
    train(f);
    fake_use(f->twins[1].tensor->param, false);
    of_counts c = counts(f);
    ck_assert_uint_eq(c.created, 4);
    ck_assert_uint_eq(c.at_once, 1);
    ck_assert_uint_eq(c.in_step, 1);
    ck_assert_uint_eq(c.at_use, 1);
    ck_assert_uint_eq(c.pending, 2);
    of_plan_flush(f->plan);
    c = counts(f);
    ck_assert_uint_eq(c.at_close, 2);
    ck_assert_uint_eq(c.pending, 0);
    ck_assert_uint_eq(c.launches, 3);
}

static void *fail_elsewhere(void *unused) {
    (void)unused;
    ck_assert_str_eq(of_error_message(), "");
    of_set_error("%s", "elsewhere");
    return NULL;
}

TEST(error_messages_belong_to_their_thread) {
    pthread_t thread;
    of_set_error("here: %d", 1);
    ck_assert_int_eq(pthread_create(&thread, NULL, fail_elsewhere, NULL), 0);
    pthread_join(thread, NULL);
    ck_assert_str_eq(of_error_message(), "here: 1");
}

FORWARD(log_goes_through_the_host) {
    ck_assert_ptr_nonnull(strstr(f->host->last_log, "2 plan for adam, forward fusion"));
    fake_use(pending(f, 10)->tensor->param, true);
    ck_assert_ptr_nonnull(strstr(f->host->last_log, "another thread used a pending parameter"));
}
