/* SPDX-License-Identifier: BSD-3-Clause */
/* A rule whose updates run programs: by kernels, or by the host, which has kernels run parts and
 * may fail. */
#include "fixture.h"

enum { N = 3, NUMEL = 5000 };

static struct {
    fake_host *host;
    of_plan *plan;
    fake_tensor *tensors[N];
    int applied; /* calls of the host's function */
    bool fails;
} w;

/* param = param + s grad */
static const of_instruction code_of_add = {
    OF_OPERATOR_add, OF_REGISTER_PARAM, OF_REGISTER_PARAM, OF_REGISTER_GRAD, 0, 2.0, 0.0};
static of_program by_kernels = {.code = &code_of_add, .n = 1};
static of_program by_host = {.reads = 3, .writes = 1, .by_host = true};

/* The gradient's first number decides by how much. */
static bool apply(void *ctx, of_inputs *in) {
    (void)ctx;
    w.applied++;
    if (w.fails) {
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
    return of_plan_run_programs(w.plan, &one, 1) == OF_OK;
}

/* Tensors with a program each and gradients of 3. */
static void begin(of_mode mode, bool has_external, of_program *const programs[N]) {
    static const of_external_host external = {sizeof external, apply};
    memset(&w, 0, sizeof w);
    w.host = fake_host_new();
    w.host->table.external = has_external ? &external : NULL;
    w.host->consumes = mode == OF_BACKWARD;
    fake_host_watches(w.host);
    of_plan_options options = {.struct_size = sizeof options, .mode = mode};
    ck_assert_ptr_null(of_program_check(&by_kernels));
    OK(of_plan_create(&w.host->table, "programs", &options, &w.plan));
    OK(of_plan_set_group(w.plan, 0, &(double){0}, 0));
    for (int i = 0; i < N; i++) {
        w.tensors[i] = fake_tensor_new(w.host, OF_FLOAT32, NUMEL, 0);
        w.tensors[i]->owned = true;
        w.tensors[i]->program = programs[i];
        fake_buffer *grad = fake_buffer_new(NUMEL * sizeof(float));
        for (int k = 0; k < NUMEL; k++)
            ((float *)grad->data)[k] = 3.0f;
        fake_set_grad(w.tensors[i], grad);
        OK(of_plan_add_slot(w.plan, w.tensors[i], 0, false, NULL));
    }
}

static void end(void) {
    of_plan_release(w.plan);
    fake_host_free(w.host);
    ck_assert(!of_any_pending());
}

static of_program *const second_by_host[N] = {&by_kernels, &by_host, &by_kernels};
static of_program *const all_by_host[N] = {&by_host, &by_host, &by_host};
#define PROGRAMS(name) AROUND(name, begin(OF_FORWARD, true, second_by_host), end())
#define BY_HOST(name, mode) AROUND(name, begin(mode, true, all_by_host), end())

static of_status step_plan(void) {
    return of_plan_step(w.plan, NULL, 0, NULL);
}

/* By a use. */
static void expect(size_t i, float value) {
    const float *param = fake_use(w.tensors[i]->param, false);
    for (int k = 0; k < NUMEL; k++)
        ck_assert_float_eq(param[k], value);
}

PROGRAMS(kernels_and_the_host_take_their_share_of_a_launch) {
    OK(step_plan());
    ck_assert_int_eq(w.applied, 0);
    OK(of_plan_flush(w.plan));
    ck_assert_int_eq(w.applied, 1);
    for (size_t i = 0; i < N; i++)
        expect(i, i == 1 ? 9 : 6);
}

PROGRAMS(profilers_see_each_update_once) {
    OK(step_plan());
    expect(2, 6);
    OK(of_plan_flush(w.plan));
    ck_assert_int_eq(w.host->watched, N);
    ck_assert_int_eq(w.host->ranges, 0);
}

PROGRAMS(use_of_a_neighbour_does_not_leave_the_hosts_out) {
    OK(step_plan());
    expect(1, 9);
    ck_assert_int_eq(w.applied, 1);
    expect(2, 6);
    expect(0, 6);
    ck_assert_int_eq(w.applied, 1);
}

PROGRAMS(parts_are_programs_of_such_a_plan) {
    of_part part = {.dtype = OF_FLOAT32, .program = &by_host};
    INVALID(of_plan_run_programs(w.plan, &part, 1), "");
    part.program = NULL;
    INVALID(of_plan_run_programs(w.plan, &part, 1), "");
    part.program = &by_kernels;
    OK(of_plan_run_programs(w.plan, &part, 1)); /* of no element */
}

/* Sizes around those of chunks, so that threads share some tensors. */
PROGRAMS(parts_run_side_by_side) {
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
    OK(of_plan_run_programs(w.plan, parts, PARTS));
    for (int i = 0; i < PARTS; i++)
        for (int k = 0; k < 9000; k++)
            ck_assert_float_eq(memory[i][0][k],
                               k < parts[i].numel ? (float)(3 * (i + k) + 2) : 0.0f);
}

AROUND(without_a_host_for_them_they_are_refused, begin(OF_FORWARD, false, second_by_host), end()) {
    INVALID(step_plan(), "runs its own operators");
}

BY_HOST(the_host_updates_at_first_use, OF_FORWARD) {
    OK(step_plan());
    ck_assert_int_eq(w.applied, 0);
    expect(1, 9);
    ck_assert_int_eq(w.applied, 1);
    OK(of_plan_flush(w.plan));
    ck_assert_int_eq(w.applied, N);
}

BY_HOST(the_host_updates_inside_step_what_others_may_see, OF_FORWARD) {
    of_counts counts;
    w.tensors[0]->shared = true;
    OK(step_plan());
    of_plan_counts(w.plan, &counts);
    ck_assert_uint_eq(counts.at_once, 1);
    ck_assert_uint_eq(counts.pending, N - 1);
    ck_assert_int_eq(w.applied, 1);
}

BY_HOST(the_host_updates_in_backward, OF_BACKWARD) {
    of_pass *pass = NULL;
    bool first = false;
    size_t at = 0;
    OK(of_pass_begin(w.plan, 1, &pass, &first));
    for (size_t i = 0; i < N; i++)
        OK(of_pass_ready(pass, i, &at));
    OK(of_pass_end(pass, &at));
    of_pass_release(pass);
    ck_assert_int_eq(w.applied, N);
}

BY_HOST(a_failure_is_told_to_who_uses_the_memory_and_to_every_step, OF_FORWARD) {
    OK(step_plan());
    w.fails = true;
    FAILS(OF_ACCESS_FAILED, of_access(w.tensors[0]->param, false), "the host can't");
    w.fails = false;
    ck_assert_int_eq(of_access(w.tensors[1]->param, false), OF_ACCESS_FAILED);
    FAILS(OF_REFUSED, step_plan(), "checkpoint");
}
