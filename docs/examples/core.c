/* SPDX-License-Identifier: BSD-3-Clause */
/* core.c: drives the core of optfuse alone, without PyTorch: arrays of floats instead of tensors,
 * a host of its own, and Adam in forward fusion. It fits a line through noisy points. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <optfuse/optfuse.h>

enum { N = 4, POINTS = 64, STEPS = 400 };

/* What the core knows as a tensor. Each array is memory that only this struct knows, so an update
 * may stay pending until somebody asks for the values (read_values()). */
typedef struct array {
    float value[N];
    float grad[N];
    float state[2][N]; /* in the rule's order: exp_avg, exp_avg_sq */
    double steps;
    int has_grad;
} array;

/* ---- the host: what the core asks of us, in the order of an update's life (host.h) */

static of_found collect(void *ctx, void *tensor, of_inputs *in) {
    array *a = tensor;
    (void)ctx;
    if (!a->has_grad)
        return OF_FOUND_NOTHING;
    in->param = a->value;
    in->grad = a->grad;
    in->state[0] = a->state[0];
    in->state[1] = a->state[1];
    in->numel = N;
    in->dtype = OF_FLOAT32;
    in->device = OF_CPU;
    in->count.step = a->steps + 1;
    /* Who uses one of these memories has the update launched first. */
    in->keys[in->n_keys++] = a->value;
    in->keys[in->n_keys++] = a->grad;
    in->references = a;
    return OF_FOUND_INPUTS;
}

static void commit(void *ctx, of_inputs *in) {
    (void)ctx;
    ((array *)in->references)->steps++;
}

/* True: everybody goes through read_values(), so the update may wait. A host that can't see all
 * uses of its memory says false, and the update runs in of_plan_step(). */
static bool defer(void *ctx, void *references) {
    (void)ctx;
    (void)references;
    return true;
}

static void settle(void *ctx, void *references, bool was_deferred) {
    (void)ctx;
    (void)references;
    (void)was_deferred;
}

/* Arrays live longer than the plan here: nothing is kept alive, and nothing is freed. */
static void release(void *ctx, void *references) {
    (void)ctx;
    (void)references;
}

static void drop(void *ctx, void *tensor) {
    (void)ctx;
    (void)tensor;
}

/* On one thread. Yours may have a pool. */
static void parallel_for(void *ctx, int64_t n, void (*fn)(void *, int64_t, int64_t), void *arg) {
    (void)ctx;
    fn(arg, 0, n);
}

static const of_host host = {
    .abi_version = OF_ABI_VERSION,
    .struct_size = sizeof(of_host),
    .collect = collect,
    .commit = commit,
    .defer = defer,
    .settle = settle,
    .release = release,
    .drop = drop,
    .parallel_for = parallel_for,
};

/* ---- the program */

static void check(of_status status) {
    if (status == OF_OK)
        return;
    fprintf(stderr, "optfuse: %s\n", of_error_message());
    exit(1);
}

/* The way to an array: the first one after of_plan_step() launches its update. */
static float *read_values(float *memory) {
    if (of_access(memory, false) == OF_ACCESS_FAILED)
        check(OF_REFUSED);
    return memory;
}

/* Mean square of slope * x + offset - y, and its gradient. Only the first element is used. */
static double loss_of(array *slope, array *offset) {
    const float k = read_values(slope->value)[0], b = read_values(offset->value)[0];
    float *dk = read_values(slope->grad), *db = read_values(offset->grad);
    double loss = 0;
    dk[0] = db[0] = 0;
    for (int i = 0; i < POINTS; i++) {
        const float x = (float)i / POINTS, y = 3 * x - 1 + 0.01f * (float)(i % 3 - 1);
        const float error = k * x + b - y;
        loss += error * error / POINTS;
        dk[0] += 2 * error * x / POINTS;
        db[0] += 2 * error / POINTS;
    }
    slope->has_grad = offset->has_grad = 1;
    return loss;
}

int main(void) {
    /* The rule's options in its order: lr, beta1, beta2, eps, weight_decay, amsgrad, maximize,
     * decoupled_weight_decay (of_rule.hyper has the names). */
    const double adam[] = {0.05, 0.9, 0.999, 1e-8, 0, 0, 0, 0};
    static array slope, offset;
    of_plan *plan = NULL;
    of_counts counts;
    double loss = 0;

    check(of_plan_create(&host, "adam", NULL, &plan)); /* NULL: forward fusion, the best kernels */
    check(of_plan_set_group(plan, 0, adam, sizeof adam / sizeof *adam));
    check(of_plan_add_slot(plan, &slope, 0, false, NULL));
    check(of_plan_add_slot(plan, &offset, 0, false, NULL));
    for (int step = 0; step < STEPS; step++) {
        size_t needs[2], n_needs; /* no state is ever missing here */
        loss = loss_of(&slope, &offset);
        check(of_plan_step(plan, needs, 2, &n_needs));
    }
    of_plan_counts(plan, &counts);
    printf("loss %.6f, %d of %d updates ran at their first use, %d are pending, kernels: %s\n",
           loss, (int)counts.at_use, (int)counts.created, (int)counts.pending,
           of_plan_isa(plan, OF_FLOAT32));
    check(of_plan_flush(plan));
    printf("y = %.3f x + %.3f\n", slope.value[0], offset.value[0]);
    of_plan_release(plan);
    return loss < 1e-3 && fabsf(slope.value[0] - 3) < 0.05f ? 0 : 1;
}
