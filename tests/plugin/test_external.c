/* SPDX-License-Identifier: BSD-3-Clause */
/* Programs of the host: its apply() does the update, when the schedule says so, and may fail. */
#include <string.h>

#include "fixture.h"

enum { N = 3 };

typedef struct world {
    fake_host *host;
    of_plan *plan;
    fake_tensor *tensors[N];
} world;

static bool fails;
static int applied;

/* Adds the gradient's first number to the parameter's. */
static bool apply(void *ctx, of_inputs *in) {
    (void)ctx;
    if (fails) {
        of_set_error("the host can't");
        return false;
    }
    applied++;
    *(float *)in->param += *(const float *)in->grad;
    return true;
}

static const of_program by_host = {.by_host = true};

static world make(of_mode mode) {
    world w = {.host = fake_host_new()};
    of_plan_options options = {.struct_size = sizeof options, .mode = mode};
    static const of_external_host external = {sizeof external, apply};
    w.host->table.external = &external;
    w.host->consumes = mode == OF_BACKWARD;
    fails = false;
    applied = 0;
    ck_assert_int_eq(of_plan_create(&w.host->table, "programs", &options, &w.plan), OF_OK);
    ck_assert_int_eq(of_plan_set_group(w.plan, 0, &(double){0}, 0), OF_OK);
    for (int i = 0; i < N; i++) {
        w.tensors[i] = fake_tensor_new(w.host, OF_FLOAT32, 5, 1);
        w.tensors[i]->owned = true;
        w.tensors[i]->program = &by_host;
        ck_assert_int_eq(of_plan_add_slot(w.plan, w.tensors[i], 0, false, NULL), OF_OK);
    }
    return w;
}

static void give_gradients(const world *w) {
    for (int i = 0; i < N; i++) {
        fake_buffer *grad = fake_buffer_new(5 * sizeof(float));
        *(float *)grad->data = (float)(i + 1);
        fake_set_grad(w->tensors[i], grad);
    }
}

static void end(world *w) {
    of_plan_release(w->plan);
    fake_host_free(w->host);
    ck_assert(!of_any_pending());
}

START_TEST(the_host_updates_at_first_use) {
    world w = make(OF_FORWARD);
    give_gradients(&w);
    ck_assert_int_eq(of_plan_step(w.plan, NULL, 0, NULL), OF_OK);
    ck_assert_int_eq(applied, 0);
    ck_assert_float_eq(*(const float *)fake_use(w.tensors[1]->param, false), 2);
    ck_assert_int_eq(applied, 1);
    ck_assert_int_eq(of_plan_flush(w.plan), OF_OK);
    ck_assert_int_eq(applied, N);
    end(&w);
}
END_TEST

START_TEST(the_host_updates_inside_step_what_others_may_see) {
    world w = make(OF_FORWARD);
    of_counts counts;
    give_gradients(&w);
    w.tensors[0]->shared = true;
    ck_assert_int_eq(of_plan_step(w.plan, NULL, 0, NULL), OF_OK);
    of_plan_counts(w.plan, &counts);
    ck_assert_uint_eq(counts.at_once, 1);
    ck_assert_uint_eq(counts.pending, N - 1);
    ck_assert_int_eq(applied, 1);
    end(&w);
}
END_TEST

START_TEST(the_host_updates_in_backward) {
    world w = make(OF_BACKWARD);
    of_pass *pass = NULL;
    bool first = false;
    size_t at = 0;
    give_gradients(&w);
    ck_assert_int_eq(of_pass_begin(w.plan, 1, &pass, &first), OF_OK);
    for (size_t i = 0; i < N; i++)
        ck_assert_int_eq(of_pass_ready(pass, i, &at), OF_OK);
    ck_assert_int_eq(of_pass_end(pass, &at), OF_OK);
    of_pass_release(pass);
    ck_assert_int_eq(applied, N);
    end(&w);
}
END_TEST

START_TEST(a_failure_is_told_to_who_uses_the_memory_and_to_every_step) {
    world w = make(OF_FORWARD);
    give_gradients(&w);
    ck_assert_int_eq(of_plan_step(w.plan, NULL, 0, NULL), OF_OK);
    fails = true;
    ck_assert_int_eq(of_access(w.tensors[0]->param, false), OF_ACCESS_FAILED);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "the host can't"));
    fails = false;
    ck_assert_int_eq(of_access(w.tensors[1]->param, false), OF_ACCESS_FAILED);
    ck_assert_int_eq(of_plan_step(w.plan, NULL, 0, NULL), OF_REFUSED);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "checkpoint"));
    end(&w);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("by host");
    TCase *tests = tcase_create("by host");
    tcase_add_test(tests, the_host_updates_at_first_use);
    tcase_add_test(tests, the_host_updates_inside_step_what_others_may_see);
    tcase_add_test(tests, the_host_updates_in_backward);
    tcase_add_test(tests, a_failure_is_told_to_who_uses_the_memory_and_to_every_step);
    suite_add_tcase(suite, tests);
    return run(suite);
}
