/* SPDX-License-Identifier: BSD-3-Clause */
/* fixture.c: see fixture.h */
#include "fixture.h"

#include <stdint.h>
#include <stdlib.h>

#include "random_bits.h"

enum { VECTOR_BYTES = 64 };

static uint64_t seed = 1;

/* In [-1, 1), the same sequence in every run. */
static double random_value(void) {
    return (double)random_bits(&seed) / (double)(UINT64_C(1) << 52) - 1.0;
}

/* Any ordinary number will do for 16 bits: these are around 1. */
static uint16_t random_narrow(of_dtype dtype) {
    unsigned bits = (unsigned)((random_value() + 1.0) * 512.0);
    unsigned sign = bits & 1 ? 0x8000u : 0u;
    unsigned one = dtype == OF_BFLOAT16 ? 0x3f80u : 0x3c00u;
    return (uint16_t)(sign | (one + (bits >> 3)));
}

static void fill_random(void *data, of_dtype dtype, int64_t numel) {
    for (int64_t i = 0; i < numel; i++) {
        if (dtype == OF_FLOAT32)
            ((float *)data)[i] = (float)random_value();
        else if (dtype == OF_FLOAT64)
            ((double *)data)[i] = random_value();
        else
            ((uint16_t *)data)[i] = random_narrow(dtype);
    }
}

static fixture *make(fake_host *host, of_mode mode, size_t bucket_bytes) {
    fixture *f = aligned_alloc(64, (sizeof *f + 63) / 64 * 64);
    ck_assert_ptr_nonnull(f);
    memset(f, 0, sizeof *f);
    f->host = host;
    f->mode = mode;
    host->consumes = mode == OF_BACKWARD;
    of_plan_options options = {.struct_size = sizeof options,
                               .mode = mode,
                               .reference = OF_REF_CPU_FUSED,
                               .vector_bytes = VECTOR_BYTES,
                               .isa = of_isa_detect(),
                               .bucket_bytes = {bucket_bytes, bucket_bytes}};
    /* lr, beta1, beta2, eps, weight_decay, amsgrad, maximize, decoupled */
    static const double adamw[] = {1e-2, 0.9, 0.999, 1e-8, 1e-2, 0, 0, 1};
    static const double adam[] = {3e-3, 0.8, 0.99, 1e-6, 0, 0, 0, 0};
    OK(of_plan_create(&host->table, "adam", &options, &f->plan));
    memcpy(f->hyper[0], adamw, sizeof adamw);
    memcpy(f->hyper[1], adam, sizeof adam);
    size_t n_hyper = of_plan_rule(f->plan)->n_hyper;
    for (size_t group = 0; group < 2; group++)
        OK(of_plan_set_group(f->plan, group, f->hyper[group], n_hyper));
    return f;
}

fixture *setup_with(fake_host *host, of_mode mode, size_t bucket_bytes) {
    seed = 1;
    return make(host, mode, bucket_bytes);
}

fixture *setup(of_mode mode, size_t bucket_bytes) {
    return setup_with(fake_host_new(), mode, bucket_bytes);
}

fixture *setup_beside(fixture *first, of_mode mode) {
    return make(first->host, mode, OF_BUCKET_NONE);
}

static void free_twin(twin *t) {
    free(t->param);
    for (size_t i = 0; i < OF_MAX_STATE; i++)
        free(t->state[i]);
}

void teardown_unchecked(fixture *f) {
    fake_host *host = f->host;
    of_pass_release(f->pass);
    of_plan_release(f->plan);
    for (size_t i = 0; i < f->n; i++)
        free_twin(&f->twins[i]);
    free(f);
    bool last = true;
    for (int i = 0; i < host->n_tensors; i++)
        last = last && (!host->tensors[i].owned || host->tensors[i].drops);
    if (last)
        fake_host_free(host);
}

void teardown(fixture *f) {
    OK(end_pass(f));
    for (size_t i = 0; i < f->n; i++)
        check_twin(&f->twins[i]);
    of_plan_flush(f->plan);
    ck_assert_uint_eq(counts(f).pending, 0);
    ck_assert_int_eq(atomic_load(&f->host->holds), 0);
    teardown_unchecked(f);
    ck_assert(!of_any_pending());
}

static unsigned char *copy_of(const fake_buffer *buffer) {
    unsigned char *copy = aligned_alloc(64, (buffer->bytes + 64) / 64 * 64);
    ck_assert_ptr_nonnull(copy);
    memcpy(copy, buffer->data, buffer->bytes);
    return copy;
}

twin *add_tensor(fixture *f, fake_tensor *tensor, size_t group, bool eager) {
    ck_assert_uint_lt(f->n, MAX_TWINS);
    twin *t = &f->twins[f->n++];
    t->tensor = tensor;
    t->hyper = f->hyper[group];
    t->param = copy_of(tensor->param);
    for (size_t i = 0; i < tensor->n_state; i++)
        t->state[i] = copy_of(tensor->state[i]);
    tensor->owned = true;
    OK(of_plan_add_slot(f->plan, tensor, group, eager, &t->slot));
    return t;
}

static twin *add_any(fixture *f, int64_t numel, of_dtype dtype, size_t group, bool eager) {
    fake_tensor *tensor = fake_tensor_new(f->host, dtype, numel, 2);
    fill_random(tensor->param->data, dtype, numel);
    return add_tensor(f, tensor, group, eager);
}

twin *add(fixture *f, int64_t numel) {
    return add_any(f, numel, OF_FLOAT32, 0, false);
}

void add_some(fixture *f, size_t n, int64_t numel) {
    for (size_t i = 0; i < n; i++)
        add(f, numel);
}

twin *add_to_group(fixture *f, int64_t numel, size_t group) {
    return add_any(f, numel, OF_FLOAT32, group, false);
}

twin *add_eager(fixture *f, int64_t numel) {
    return add_any(f, numel, OF_FLOAT32, 0, true);
}

twin *add_dtype(fixture *f, int64_t numel, of_dtype dtype) {
    return add_any(f, numel, dtype, 0, false);
}

void backward(twin *t) {
    fake_buffer *grad = fake_buffer_new(t->tensor->param->bytes);
    fill_random(grad->data, t->tensor->dtype, t->tensor->numel);
    fake_set_grad(t->tensor, grad);
}

void backward_all(fixture *f) {
    for (size_t i = 0; i < f->n; i++)
        backward(&f->twins[i]);
}

void expect_update_at(twin *t, void *param, void **state) {
    const fake_tensor *tensor = t->tensor;
    const of_rule *rule = of_rule_find("adam");
    const of_kernel *kernel =
        of_kernel_find("adam", OF_REF_CPU_FUSED, tensor->dtype, OF_CPU, of_isa_detect());
    _Alignas(16) unsigned char scalars[OF_MAX_SCALARS];
    size_t numel = (size_t)tensor->numel;
    of_span span = {.param = param, .grad = tensor->grad->data, .n = numel};
    for (size_t i = 0; i < tensor->n_state; i++)
        span.state[i] = state[i];
    span.tail = of_tail(rule, OF_REF_CPU_FUSED, tensor->dtype, VECTOR_BYTES, numel);
    of_count count = {.step = ++t->step};
    rule->prepare(t->hyper, &count, scalars);
    if (numel)
        kernel->run(&span, scalars);
}

void expect_update(fixture *f, twin *t) {
    (void)f;
    void *state[OF_MAX_STATE];
    for (size_t i = 0; i < OF_MAX_STATE; i++)
        state[i] = t->state[i];
    expect_update_at(t, t->param, state);
}

of_pass *begin_pass(fixture *f) {
    static atomic_uint_least64_t token = OF_NO_TOKEN;
    of_pass *pass = NULL;
    bool first = false;
    OK(of_pass_begin(f->plan, ++token, &pass, &first));
    ck_assert(first);
    return pass;
}

of_status ready(fixture *f, size_t slot) {
    size_t at = 0;
    if (!f->pass)
        f->pass = begin_pass(f);
    return of_pass_ready(f->pass, slot, &at);
}

of_status end_pass(fixture *f) {
    size_t at = 0;
    of_pass *pass = f->pass;
    f->pass = NULL;
    of_status status = pass ? of_pass_end(pass, &at) : OF_OK;
    of_pass_release(pass);
    return status;
}

void backward_expected(fixture *f) {
    backward_all(f);
    for (size_t i = 0; i < f->n; i++)
        expect_update(f, &f->twins[i]);
}

void step(fixture *f) {
    OK(end_pass(f));
    for (size_t i = 0; i < f->n; i++)
        if (f->twins[i].tensor->grad)
            expect_update(f, &f->twins[i]);
    size_t n_needs = 1;
    OK(of_plan_step(f->plan, NULL, 0, &n_needs));
    ck_assert_uint_eq(n_needs, 0);
}

void train(fixture *f) {
    backward_all(f);
    step(f);
}

twin *pending(fixture *f, int64_t numel) {
    twin *t = add(f, numel);
    backward(t);
    step(f);
    return t;
}

void step_only(fixture *f) {
    OK(of_plan_step(f->plan, NULL, 0, NULL));
}

void gradient(fixture *f, twin *t) {
    backward(t);
    expect_update(f, t);
    OK(ready(f, t->slot));
}

bool launched(const twin *t) {
    const fake_tensor *tensor = t->tensor;
    bool equal = memcmp(tensor->param->data, t->param, tensor->param->bytes) == 0;
    for (size_t i = 0; i < tensor->n_state; i++)
        equal = equal && memcmp(tensor->state[i]->data, t->state[i], tensor->param->bytes) == 0;
    return equal;
}

bool twin_equal(const twin *t) {
    fake_use(t->tensor->param, false);
    for (size_t i = 0; i < t->tensor->n_state; i++)
        fake_use(t->tensor->state[i], false);
    return launched(t);
}

void check_twin(const twin *t) {
    ck_assert_msg(twin_equal(t), "tensor %d of %lld elements differs after %g updates",
                  t->tensor->id, (long long)t->tensor->numel, t->step);
    ck_assert_msg(t->tensor->step == t->step, "tensor %d counts %g updates, not %g", t->tensor->id,
                  t->tensor->step, t->step);
}

void set_lr(fixture *f, size_t group, double lr) {
    f->hyper[group][0] = lr;
    OK(of_plan_set_group(f->plan, group, f->hyper[group], of_plan_rule(f->plan)->n_hyper));
}

of_counts counts(const fixture *f) {
    of_counts c;
    of_plan_counts(f->plan, &c);
    return c;
}
