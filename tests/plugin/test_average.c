/* SPDX-License-Identifier: BSD-3-Clause */
/* Averages that are made by the launch of the parameter's update. */
#include "fixture.h"
#include "floating.h"

enum { NUMEL = 5003 }; /* more than a chunk, with a tail */

/* average = average + 0.25 (param - average) */
static const of_instruction code = {
    OF_OPERATOR_lerp, OF_REGISTER_PARAM, OF_REGISTER_PARAM, OF_REGISTER_GRAD, 0, 0.25, 0.0};
static of_program lerp = {.code = &code, .n = 1};

static fixture *f;
static twin *t;
static fake_buffer *average;
static float before[NUMEL]; /* the average, where one is pending */

static void begin(void) {
    ck_assert_ptr_null(of_program_check(&lerp));
    f = setup(OF_FORWARD, 0);
    t = add(f, NUMEL);
    average = fake_buffer_new(NUMEL * sizeof(float));
    for (int i = 0; i < NUMEL; i++)
        ((float *)average->data)[i] = (float)(i % 7);
}

static void end(void) {
    OK(of_plan_flush(f->plan));
    ck_assert_int_eq(average->refs, 1);
    fake_buffer_release(average);
    teardown(f);
}

static of_average of_tensor(const fake_tensor *tensor) {
    return (of_average){.param_key = tensor->param,
                        .key = average,
                        .memory = average->data,
                        .numel = tensor->numel,
                        .dtype = tensor->dtype,
                        .program = &lerp,
                        .host = average};
}

static bool behind(of_average a) {
    return of_average_behind(&a);
}

static void begin_with_a_pending_average(void) {
    begin();
    memcpy(before, average->data, sizeof before);
    train(f);
    ck_assert(behind(of_tensor(t->tensor)));
}

/* Expects the one of a parameter with these values, made by one direct call of the kernel. */
static void expect_average(const void *param) {
    float expected[NUMEL];
    const of_program *program = &lerp;
    const of_rule *rule = of_rule_find("programs");
    memcpy(expected, before, sizeof expected);
    of_span span = {.param = expected, .grad = param, .n = NUMEL};
    span.tail = of_tail(rule, OF_REF_CPU_FUSED, OF_FLOAT32, 32, NUMEL);
    of_kernel_find("programs", OF_REF_CPU_FUSED, OF_FLOAT32, OF_CPU, of_isa_detect())
        ->run(&span, &program);
    ck_assert_mem_eq(fake_use(average, false), expected, sizeof expected);
}

/* Tests in which an average is pending, or none yet. */
#define PENDING(name) AROUND(name, begin_with_a_pending_average(), end())
#define NONE_YET(name) AROUND(name, begin(), end())

PENDING(launch_makes_the_average_of_the_updated_parameter) {
    ck_assert_mem_eq(average->data, before, sizeof before); /* not yet */
    fake_use(t->tensor->param, false);
    expect_average(t->param);
    ck_assert_uint_eq(counts(f).averages, 1);
}

PENDING(use_of_the_average_launches) {
    expect_average(t->param);
    ck_assert(launched(t) && !of_any_pending());
}

PENDING(next_step_makes_it_before_its_own_update) {
    float param[NUMEL];
    memcpy(param, t->param, sizeof param);
    train(f);
    expect_average(param);
}

PENDING(a_record_that_is_used_again_has_no_average) {
    OK(of_plan_flush(f->plan));
    memcpy(before, average->data, sizeof before);
    train(f);
    OK(of_plan_flush(f->plan));
    ck_assert_mem_eq(average->data, before, sizeof before);
}

NONE_YET(refused_where_the_caller_has_to_make_it) {
    const of_average right = of_tensor(t->tensor);
    ck_assert(!behind(right)); /* nothing is pending */
    train(f);
#define REFUSED(field, value)                                                                      \
    do {                                                                                           \
        of_average wrong = right;                                                                  \
        wrong.field = value;                                                                       \
        ck_assert(!behind(wrong));                                                                 \
    } while (0)
    REFUSED(numel, NUMEL - 1);
    REFUSED(dtype, OF_FLOAT64);
    REFUSED(param_key, t->tensor->state[0]);
    REFUSED(key, t->tensor->grad); /* the update has it already */
    ck_assert(behind(right));
    ck_assert(!behind(right)); /* it has one */
    ck_assert_uint_eq(counts(f).averages, 1);
}

#if !defined(__aarch64__)
NONE_YET(denormals_are_flushed_for_both_or_not_at_all) {
    const unsigned outside = of_floating_now(), flush = 0x8000;
    train(f);
    of_floating_set(outside | flush);
    const bool taken = behind(of_tensor(t->tensor));
    of_floating_set(outside);
    ck_assert(!taken);
}
#endif
