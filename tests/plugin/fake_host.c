/* SPDX-License-Identifier: BSD-3-Clause */
/* fake_host.c: see fake_host.h. Allocates with aligned_alloc() throughout, so
 * that a test can let malloc() fail for the core alone. */
#include "fake_host.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_device.h"

enum { MAX_BUFFERS = 3 + OF_MAX_STATE };

typedef struct fake_hold {
    fake_tensor *tensor;
    fake_buffer *buffers[MAX_BUFFERS]; /* parameter, gradient, state, average */
    size_t n_buffers;
    fake_buffer *factor; /* on a device */
    bool inside;  /* the update */
    bool scaling; /* of a gradient: there is no commit() */
    bool committed;
    bool deferred;
    bool settled;
} fake_hold;

/* For use inside the core's calls, where Check's own allocations would count
 * as the core's. */
static void require(bool kept, const char *promise) {
    if (kept)
        return;
    fprintf(stderr, "the core broke a promise to its host: %s\n", promise);
    abort();
}

static void *allocate(size_t bytes) {
    size_t rounded = (bytes + 63) / 64 * 64;
    void *memory = aligned_alloc(64, rounded);
    if (!memory)
        abort();
    memset(memory, 0, rounded);
    return memory;
}

static void record(fake_host *host, const char *event, int id) {
    pthread_mutex_lock(&host->lock);
    size_t length = strlen(host->events);
    if (host->recording && id >= 0)
        snprintf(host->events + length, sizeof host->events - length, "%s%s:%d", length ? " " : "",
                 event, id);
    else if (host->recording)
        snprintf(host->events + length, sizeof host->events - length, "%s%s", length ? " " : "",
                 event);
    pthread_mutex_unlock(&host->lock);
}

void fake_record(fake_host *host) {
    host->recording = true;
    host->events[0] = '\0';
}

const char *fake_events(fake_host *host) {
    static char copy[sizeof host->events];
    memcpy(copy, host->events, sizeof copy);
    host->events[0] = '\0';
    return copy;
}

fake_buffer *fake_buffer_new(size_t bytes) {
    fake_buffer *buffer = allocate(sizeof *buffer + bytes);
    atomic_init(&buffer->refs, 1);
    buffer->bytes = bytes;
    return buffer;
}

void fake_buffer_retain(fake_buffer *buffer) {
    atomic_fetch_add(&buffer->refs, 1);
}

void fake_buffer_release(fake_buffer *buffer) {
    if (buffer && atomic_fetch_sub(&buffer->refs, 1) == 1)
        free(buffer);
}

static fake_tensor *next_tensor(fake_host *host) {
    ck_assert_int_lt(host->n_tensors, FAKE_MAX_TENSORS);
    fake_tensor *tensor = &host->tensors[host->n_tensors];
    *tensor = (fake_tensor){.host = host, .id = host->n_tensors++};
    return tensor;
}

fake_tensor *fake_tensor_new(fake_host *host, of_dtype dtype, int64_t numel, size_t n_state) {
    fake_tensor *tensor = next_tensor(host);
    size_t bytes = (size_t)numel * of_dtype_size(dtype);
    tensor->dtype = dtype;
    tensor->numel = numel;
    tensor->param = fake_buffer_new(bytes);
    tensor->n_state = n_state;
    for (size_t i = 0; i < n_state; i++)
        tensor->state[i] = fake_buffer_new(bytes);
    return tensor;
}

fake_tensor *fake_tensor_alias(fake_tensor *of) {
    fake_tensor *tensor = next_tensor(of->host);
    tensor->dtype = of->dtype;
    tensor->numel = of->numel;
    tensor->n_state = of->n_state;
    tensor->param = of->param;
    fake_buffer_retain(of->param);
    for (size_t i = 0; i < of->n_state; i++)
        tensor->state[i] = fake_buffer_new(of->param->bytes);
    return tensor;
}

void fake_set_grad(fake_tensor *tensor, fake_buffer *grad) {
    fake_buffer_release(tensor->grad);
    tensor->grad = grad;
}

const void *fake_use(fake_buffer *buffer, bool foreign) {
    if (atomic_load(&buffer->marked) && of_access(buffer, foreign) < OF_IN_FLIGHT &&
        buffer->on_device)
        atomic_store(&buffer->marked, false);
    return buffer->data;
}

static void hold_buffer(fake_hold *hold, fake_buffer *buffer, of_inputs *in) {
    fake_buffer_retain(buffer);
    buffer->on_device = hold->tensor->device != OF_CPU;
    hold->buffers[hold->n_buffers++] = buffer;
    in->keys[in->n_keys++] = buffer;
}

static fake_hold *new_hold(fake_tensor *tensor, of_inputs *in) {
    bool inside = tensor->host->holds_inside;
    fake_hold *hold = inside ? in->references : allocate(sizeof *hold);
    *hold = (fake_hold){.tensor = tensor, .inside = inside};
    in->numel = tensor->numel;
    in->dtype = tensor->dtype;
    in->mixed = tensor->mixed;
    in->device = tensor->device;
    in->references = hold;
    return hold;
}

/* Inputs that come again must be those of the tensor's last update. Others come empty, and may come
 * again if nothing is special about them. */
static void look_whether_again(fake_tensor *tensor, of_inputs *in) {
    const bool came = in->again;
    const bool plain = tensor->device == OF_CPU && !tensor->awaits && !tensor->product &&
                       !tensor->program && !tensor->exclusive && !tensor->mixed;
    const bool same = came && plain && in->numel == tensor->numel && in->dtype == tensor->dtype &&
                      in->n_keys == 2 + tensor->n_state;
    require(came ? in->param == tensor->collected : !in->param && !in->numel && !in->n_keys,
            "inputs come empty, or as they were left");
    if (came && !same)
        *in = (of_inputs){.references = in->references, .in_backward = in->in_backward};
    in->again = came ? same : plain;
    in->n_keys = 0;
    tensor->again += same;
    tensor->collected = tensor->param->data;
}

static void fill(fake_tensor *tensor, of_inputs *in) {
    look_whether_again(tensor, in);
    fake_hold *hold = new_hold(tensor, in);
    hold_buffer(hold, tensor->param, in);
    hold_buffer(hold, tensor->grad, in);
    in->grad_key = tensor->exclusive ? NULL : tensor->grad;
    in->param = tensor->param->data;
    in->grad = tensor->exclusive ? NULL : tensor->grad->data;
    in->exclusive = tensor->exclusive;
    for (size_t i = 0; i < tensor->n_state; i++) {
        hold_buffer(hold, tensor->state[i], in);
        in->state[i] = tensor->state[i]->data;
    }
    if (tensor->device == OF_CUDA && tensor->host->table.gpu) {
        in->ready = tensor->host->table.gpu->current(tensor->host, 0);
        in->stream = fake_home();
    }
    in->count.step = tensor->step + 1;
    in->step_at = tensor->step_at;
    in->awaits = tensor->awaits;
    in->product = tensor->product;
    in->rows = tensor->rows;
    in->panel_rows = tensor->panel_rows;
    if (in->product)
        in->grad = NULL;
    in->program = tensor->program;
}

static of_found collect(void *ctx, void *opaque, of_inputs *in) {
    fake_host *host = ctx;
    fake_tensor *tensor = opaque;
    record(host, "collect", tensor->id);
    if (tensor->used_on_look)
        fake_use(tensor->used_on_look, false);
    if (tensor->on_collect)
        tensor->on_collect(tensor->arg);
    if (tensor->broken) {
        of_set_error("tensor %d is broken", tensor->id);
        return OF_FOUND_ERROR;
    }
    if (!tensor->grad)
        return OF_FOUND_NOTHING;
    if (tensor->lacks_state)
        return OF_FOUND_NEEDS_STATE;
    if (tensor->device == OF_CUDA && host->table.gpu) {
        const of_stream ready = host->table.gpu->current(host, 0);
        if (!of_scaling_fits(tensor->grad, &ready))
            of_access(tensor->grad, false);
    }
    atomic_fetch_add(&host->holds, 1);
    fill(tensor, in);
    return OF_FOUND_INPUTS;
}

/* An exclusive update without gradient memory is given a dense copy. */
static void commit(void *ctx, of_inputs *in) {
    fake_hold *hold = in->references;
    if (!in->grad)
        in->grad = hold->buffers[1]->data;
    record(ctx, "commit", hold->tensor->id);
    require(!hold->committed, "commit once");
    hold->committed = true;
    hold->tensor->step++;
}

static void mark(fake_hold *hold) {
    for (size_t i = 0; i < hold->n_buffers; i++)
        atomic_store(&hold->buffers[i]->marked, true);
}

/* A gradient that is still to be multiplied stays marked, and what is on a device
 * until it is used. */
static void unmark(fake_hold *hold) {
    for (size_t i = 0; i < hold->n_buffers; i++)
        if (!hold->buffers[i]->on_device && (hold->scaling || !of_is_scaled(hold->buffers[i])))
            atomic_store(&hold->buffers[i]->marked, false);
}

/* Scalings of gradients */

static of_found collect_gradient(void *ctx, void *opaque, of_inputs *in) {
    fake_host *host = ctx;
    fake_tensor *tensor = opaque;
    record(host, "scale", tensor->id);
    if (!tensor->grad || tensor->exclusive)
        return OF_FOUND_NOTHING;
    of_launch_at(tensor->grad, false);
    atomic_fetch_add(&host->holds, 1);
    fake_hold *hold = new_hold(tensor, in);
    hold->scaling = true;
    hold_buffer(hold, tensor->grad, in);
    in->param = tensor->grad->data;
    if (tensor->device == OF_CUDA) {
        in->grad = in->param;
        in->ready = in->stream = host->table.gpu->current(host, 0);
        in->factor_at = tensor->factor->data;
        hold->factor = tensor->factor;
        fake_buffer_retain(hold->factor);
    }
    return OF_FOUND_INPUTS;
}

static void share_factor(void *ctx, void *to, const void *from) {
    (void)ctx;
    fake_hold *hold = to;
    require(!hold->factor, "share the factor of one scaling");
    hold->factor = ((const fake_hold *)from)->factor;
    fake_buffer_retain(hold->factor);
}

/* The hold's own reference stands for a weak one. */
static bool is_alive(void *ctx, void *opaque) {
    (void)ctx;
    return atomic_load(&((fake_hold *)opaque)->buffers[0]->refs) > 1;
}

static bool defer(void *ctx, void *opaque) {
    fake_hold *hold = opaque;
    record(ctx, hold->tensor->shared ? "refuse" : "defer", hold->tensor->id);
    require(hold->committed != hold->scaling && !hold->deferred && !hold->settled,
            "defer after commit, once");
    if (hold->tensor->shared)
        return false;
    mark(hold);
    hold->deferred = true;
    return true;
}

/* The key is entered by the core. */
static void defer_average(void *ctx, void *opaque, void *average) {
    fake_hold *hold = opaque;
    record(ctx, "average", hold->tensor->id);
    require(hold->deferred && !hold->settled, "an average while the update is pending");
    fake_buffer_retain(average);
    hold->buffers[hold->n_buffers++] = average;
    atomic_store(&((fake_buffer *)average)->marked, true);
}

static _Thread_local bool settling;

static void begin_settling(void *ctx) {
    (void)ctx;
    settling = true;
}

static void settle(void *ctx, void *opaque, bool was_deferred) {
    fake_host *host = ctx;
    fake_hold *hold = opaque;
    fake_tensor *tensor = hold->tensor;
    record(host, "settle", tensor->id);
    require(hold->committed != hold->scaling && !hold->settled, "settle after commit, once");
    require(was_deferred == hold->deferred, "settle knows what was deferred");
    require(settling || tensor->device != OF_CPU, "settling has begun");
    hold->settled = true;
    if (was_deferred)
        unmark(hold);
    if (host->consumes && tensor->grad == hold->buffers[1])
        fake_set_grad(tensor, NULL);
}

/* A real host frees tensors here, which may make it use others. */
static void release(void *ctx, void *opaque) {
    fake_host *host = ctx;
    fake_hold *hold = opaque;
    fake_tensor *tensor = hold->tensor;
    record(host, "release", tensor->id);
    settling = false;
    require(hold->settled || !hold->committed, "release no committed update before it is settled");
    for (size_t i = 0; i < hold->n_buffers; i++)
        fake_buffer_release(hold->buffers[i]);
    fake_buffer_release(hold->factor);
    if (!hold->inside)
        free(hold);
    const bool flushes = host->flushes_on_release;
    void (*const on_release)(void *) = tensor->on_release;
    void *const arg = tensor->arg;
    /* Without holds the host may be freed, also by another thread. */
    atomic_fetch_sub(&host->holds, 1);
    if (on_release)
        on_release(arg);
    if (flushes)
        of_flush_all();
}

static void prefetch(void *ctx, void *const *tensors, size_t n) {
    (void)ctx;
    for (size_t i = 0; i < n; i++)
        ((fake_tensor *)tensors[i])->prefetched++;
}

static void drop(void *ctx, void *opaque) {
    fake_tensor *tensor = opaque;
    record(ctx, "drop", tensor->id);
    tensor->drops++;
}

typedef struct range {
    void (*fn)(void *arg, int64_t begin, int64_t end);
    void *arg;
    int64_t begin;
    int64_t end;
} range;

static void *run_range(void *opaque) {
    range *r = opaque;
    r->fn(r->arg, r->begin, r->end);
    return NULL;
}

static int threads(void *ctx) {
    return ((const fake_host *)ctx)->n_threads;
}

static void parallel_for(void *ctx, int64_t n, void (*fn)(void *arg, int64_t begin, int64_t end),
                         void *arg) {
    fake_host *host = ctx;
    pthread_t threads[16];
    range ranges[16];
    record(host, "region", -1);
    atomic_fetch_add(&host->regions, 1);
    for (int i = 0; i < host->n_threads; i++) {
        ranges[i] = (range){fn, arg, n * i / host->n_threads, n * (i + 1) / host->n_threads};
        if (i && pthread_create(&threads[i], NULL, run_range, &ranges[i]) != 0)
            abort();
    }
    run_range(&ranges[0]);
    for (int i = 1; i < host->n_threads; i++)
        pthread_join(threads[i], NULL);
}

static void log_message(void *ctx, int level, const char *message) {
    fake_host *host = ctx;
    snprintf(host->last_log, sizeof host->last_log, "%d %s", level, message);
}

/* Backward passes */

static bool begin(void *ctx, bool only_adds) {
    fake_host *host = ctx;
    if (host->on_begin)
        host->on_begin(host->arg);
    if (host->refuses) {
        of_set_error("the host is not ready for backward");
        return false;
    }
    atomic_fetch_add(&host->begun, 1);
    atomic_fetch_add(&host->begun_adding, only_adds);
    return true;
}

static of_device measure(void *ctx, void *opaque, int64_t *numel, size_t *bytes, of_stream *on) {
    const fake_tensor *tensor = opaque;
    fake_host *host = ctx;
    if (tensor->device != OF_CPU)
        *on = host->table.gpu->current(host, 0);
    *numel = tensor->numel;
    *bytes = tensor->param->bytes;
    return tensor->device;
}

static bool make_state(void *ctx, size_t slot) {
    fake_host *host = ctx;
    if (host->refuses) {
        of_set_error("no state for slot %zu", slot);
        return false;
    }
    atomic_fetch_add(&host->made, 1);
    for (int i = 0; i < host->n_tensors; i++) /* tests that use it have one plan */
        if (host->tensors[i].id == (int)slot)
            host->tensors[i].lacks_state = false;
    return true;
}

static void *watch(void *ctx, const void *references, size_t n) {
    fake_host *host = ctx;
    ck_assert_ptr_nonnull(references);
    host->watched += (int)n;
    host->ranges++;
    return host;
}

static void unwatch(void *ctx, void *watched) {
    ck_assert_ptr_eq(watched, ctx);
    ((fake_host *)ctx)->ranges--;
}

void fake_host_watches(fake_host *host) {
    host->table.watch = watch;
    host->table.unwatch = unwatch;
}

fake_host *fake_host_new(void) {
    static const of_backward_host backward = {sizeof backward, begin, measure, make_state};
    static const of_scaling_host scaling = {.struct_size = sizeof scaling,
                                            .collect = collect_gradient,
                                            .defer = defer,
                                            .settle = settle,
                                            .is_alive = is_alive,
                                            .keep = is_alive,
                                            .share_factor = share_factor};
    fake_host *host = allocate(sizeof *host);
    host->n_threads = 3;
    pthread_mutex_init(&host->lock, NULL);
    host->table = (of_host){.abi_version = OF_ABI_VERSION,
                            .struct_size = sizeof(of_host),
                            .ctx = host,
                            .reference_bytes = sizeof(fake_hold),
                            .collect = collect,
                            .prefetch = prefetch,
                            .commit = commit,
                            .defer = defer,
                            .defer_average = defer_average,
                            .begin_settling = begin_settling,
                            .settle = settle,
                            .release = release,
                            .drop = drop,
                            .parallel_for = parallel_for,
                            .threads = threads,
                            .log = log_message,
                            .backward = &backward,
                            .scaling = &scaling};
    return host;
}

void fake_host_free(fake_host *host) {
    ck_assert_int_eq(atomic_load(&host->holds), 0);
    for (int i = 0; i < host->n_tensors; i++) {
        fake_tensor *tensor = &host->tensors[i];
        ck_assert_int_eq(tensor->drops, tensor->owned);
        fake_buffer_release(tensor->param);
        fake_buffer_release(tensor->grad);
        for (size_t k = 0; k < tensor->n_state; k++)
            fake_buffer_release(tensor->state[k]);
    }
    pthread_mutex_destroy(&host->lock);
    free(host);
}
