/* SPDX-License-Identifier: BSD-3-Clause */
/* A rule whose updates run programs: by kernels, or by the host, which has kernels run parts. */
#include <string.h>

#include "fixture.h"

enum { N = 3, NUMEL = 5000 };

typedef struct world {
    fake_host *host;
    of_plan *plan;
    fake_tensor *tensors[N];
} world;

static of_plan *applied_by;
static int applied;
static bool fails;

/* param = param + s grad */
static const of_instruction code_of_add = {
    OF_OPERATOR_add, OF_REGISTER_PARAM, OF_REGISTER_PARAM, OF_REGISTER_GRAD, 0, 2.0, 0.0};
static of_program by_kernels = {.code = &code_of_add, .n = 1};
static of_program by_host = {.reads = 3, .writes = 1, .by_host = true};

/* The gradient's first number decides by how much. */
static bool apply(void *ctx, of_inputs *in) {
    (void)ctx;
    applied++;
    if (fails) {
        of_set_error("the host can't");
        return false;
    }
    of_instruction code = code_of_add;
    code.s = *(const float *)in->grad;
    of_program part = {.code = &code, .n = 1};
    ck_assert_ptr_null(of_program_check(&part));
    of_part one = {.numel = in->numel, .dtype = in->dtype, .program = &part};
    one.memory[OF_REGISTER_PARAM] = in->param;
    one.memory[OF_REGISTER_GRAD] = (void *)(uintptr_t)in->grad;
    return of_plan_run_programs(applied_by, &one, 1) == OF_OK;
}

static bool watches;

static world make(bool has_external) {
    static const of_external_host external = {sizeof external, apply};
    world w = {.host = fake_host_new()};
    of_plan_options options = {.struct_size = sizeof options, .mode = OF_FORWARD};
    w.host->table.external = has_external ? &external : NULL;
    if (watches)
        fake_host_watches(w.host);
    applied = 0;
    fails = false;
    ck_assert_ptr_null(of_program_check(&by_kernels));
    ck_assert_int_eq(of_plan_create(&w.host->table, "programs", &options, &w.plan), OF_OK);
    applied_by = w.plan;
    ck_assert_int_eq(of_plan_set_group(w.plan, 0, &(double){0}, 0), OF_OK);
    for (int i = 0; i < N; i++) {
        w.tensors[i] = fake_tensor_new(w.host, OF_FLOAT32, NUMEL, 0);
        w.tensors[i]->owned = true;
        w.tensors[i]->program = i == 1 ? &by_host : &by_kernels;
        fake_buffer *grad = fake_buffer_new(NUMEL * sizeof(float));
        for (int k = 0; k < NUMEL; k++)
            ((float *)grad->data)[k] = 3.0f;
        fake_set_grad(w.tensors[i], grad);
        ck_assert_int_eq(of_plan_add_slot(w.plan, w.tensors[i], 0, false, NULL), OF_OK);
    }
    return w;
}

static void end(world *w) {
    of_plan_release(w->plan);
    fake_host_free(w->host);
    ck_assert(!of_any_pending());
}

static void expect(const fake_tensor *tensor, float value) {
    const float *param = fake_use(tensor->param, false);
    for (int k = 0; k < NUMEL; k++)
        ck_assert_float_eq(param[k], value);
}

START_TEST(kernels_and_the_host_take_their_share_of_a_launch) {
    world w = make(true);
    ck_assert_int_eq(of_plan_step(w.plan, NULL, 0, NULL), OF_OK);
    ck_assert_int_eq(applied, 0);
    ck_assert_int_eq(of_plan_flush(w.plan), OF_OK);
    ck_assert_int_eq(applied, 1);
    expect(w.tensors[0], 6);
    expect(w.tensors[1], 9);
    expect(w.tensors[2], 6);
    end(&w);
}
END_TEST

START_TEST(profilers_see_each_update_once) {
    watches = true;
    world w = make(true);
    ck_assert_int_eq(of_plan_step(w.plan, NULL, 0, NULL), OF_OK);
    expect(w.tensors[2], 6);
    ck_assert_int_eq(of_plan_flush(w.plan), OF_OK);
    ck_assert_int_eq(w.host->watched, N);
    ck_assert_int_eq(w.host->ranges, 0);
    end(&w);
    watches = false;
}
END_TEST

START_TEST(use_of_a_neighbour_does_not_leave_the_hosts_out) {
    world w = make(true);
    ck_assert_int_eq(of_plan_step(w.plan, NULL, 0, NULL), OF_OK);
    expect(w.tensors[1], 9);
    ck_assert_int_eq(applied, 1);
    expect(w.tensors[2], 6);
    expect(w.tensors[0], 6);
    ck_assert_int_eq(applied, 1);
    end(&w);
}
END_TEST

START_TEST(a_failure_is_told_to_who_uses_the_memory) {
    world w = make(true);
    ck_assert_int_eq(of_plan_step(w.plan, NULL, 0, NULL), OF_OK);
    fails = true;
    ck_assert_int_eq(of_access(w.tensors[1]->param, false), OF_ACCESS_FAILED);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "the host can't"));
    ck_assert_int_eq(of_plan_step(w.plan, NULL, 0, NULL), OF_REFUSED);
    end(&w);
}
END_TEST

START_TEST(without_a_host_for_them_they_are_refused) {
    world w = make(false);
    ck_assert_int_eq(of_plan_step(w.plan, NULL, 0, NULL), OF_INVALID);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "runs its own operators"));
    end(&w);
}
END_TEST

START_TEST(parts_are_programs_of_such_a_plan) {
    world w = make(true);
    of_part part = {.dtype = OF_FLOAT32, .program = &by_host};
    ck_assert_int_eq(of_plan_run_programs(w.plan, &part, 1), OF_INVALID);
    part.program = NULL;
    ck_assert_int_eq(of_plan_run_programs(w.plan, &part, 1), OF_INVALID);
    part.program = &by_kernels;
    ck_assert_int_eq(of_plan_run_programs(w.plan, &part, 1), OF_OK); /* of no element */
    end(&w);
}
END_TEST

/* Sizes around those of chunks, so that threads share some tensors. */
START_TEST(parts_run_side_by_side) {
    world w = make(true);
    enum { PARTS = 12 };
    static float memory[PARTS][2][9000];
    of_part parts[PARTS] = {0};
    for (int i = 0; i < PARTS; i++) {
        parts[i] = (of_part){.numel = i % 3 == 0 ? i : 750 * i, .program = &by_kernels};
        for (int j = 0; j < 2; j++)
            for (int k = 0; k < parts[i].numel; k++)
                memory[i][j][k] = (float)(i + j + k);
        parts[i].memory[OF_REGISTER_PARAM] = memory[i][0];
        parts[i].memory[OF_REGISTER_GRAD] = memory[i][1];
    }
    ck_assert_int_eq(of_plan_run_programs(w.plan, parts, PARTS), OF_OK);
    for (int i = 0; i < PARTS; i++)
        for (int k = 0; k < 9000; k++)
            ck_assert_float_eq(memory[i][0][k],
                               k < parts[i].numel ? (float)(3 * (i + k) + 2) : 0.0f);
    end(&w);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("programs");
    TCase *tcase = tcase_create("programs");
    tcase_add_test(tcase, kernels_and_the_host_take_their_share_of_a_launch);
    tcase_add_test(tcase, profilers_see_each_update_once);
    tcase_add_test(tcase, use_of_a_neighbour_does_not_leave_the_hosts_out);
    tcase_add_test(tcase, a_failure_is_told_to_who_uses_the_memory);
    tcase_add_test(tcase, without_a_host_for_them_they_are_refused);
    tcase_add_test(tcase, parts_are_programs_of_such_a_plan);
    tcase_add_test(tcase, parts_run_side_by_side);
    suite_add_tcase(suite, tcase);
    return run(suite);
}
