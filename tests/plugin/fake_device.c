/* SPDX-License-Identifier: BSD-3-Clause */
/* fake_device.c: see fake_device.h */
#include "fake_device.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "cuda/cuda_kernels.h"
#include "scale.h"

enum { HOST = FAKE_STREAMS };

fake_device device;

static void join(fake_clock *clock, const fake_clock *with) {
    for (int i = 0; i < FAKE_CLOCKS; i++)
        if (clock->at[i] < with->at[i])
            clock->at[i] = with->at[i];
}

/* Work that is put on a stream comes after all that the host knows. */
static fake_clock *advance(fake_timeline *t, int stream) {
    fake_clock *clock = &t->streams[stream];
    join(clock, &t->streams[HOST]);
    clock->at[stream]++;
    return clock;
}

static size_t place_of(fake_timeline *t, const void *memory) {
    size_t i = 0;
    while (i < t->n_seen && t->seen[i].memory != memory)
        i++;
    if (i == t->n_seen) {
        if (i == sizeof t->seen / sizeof *t->seen)
            abort(); /* inside the core's calls, where Check may not allocate */
        memset(&t->seen[i], 0, sizeof t->seen[i]);
        t->seen[i].memory = memory;
        t->n_seen++;
    }
    return i;
}

bool fake_timeline_ordered(const fake_timeline *t, int stream, const void *memory, bool write) {
    fake_clock clock = t->streams[stream];
    join(&clock, &t->streams[HOST]);
    for (size_t i = 0; i < t->n_seen; i++) {
        if (t->seen[i].memory != memory)
            continue;
        bool ordered = t->seen[i].written <= clock.at[t->seen[i].writer];
        for (int s = 0; write && s < FAKE_STREAMS; s++)
            ordered = ordered && t->seen[i].read[s] <= clock.at[s];
        return ordered;
    }
    return true;
}

void fake_timeline_access(fake_timeline *t, int stream, const void *memory, bool write,
                          const char *who) {
    if (!fake_timeline_ordered(t, stream, memory, write) && t->races++ == 0)
        snprintf(t->first_race, sizeof t->first_race, "%s %s on stream %d", who,
                 write ? "writes" : "reads", stream);
    const unsigned now = advance(t, stream)->at[stream];
    const size_t i = place_of(t, memory);
    t->seen[i].read[stream] = now;
    if (write) {
        t->seen[i].writer = stream;
        t->seen[i].written = now;
    }
}

void fake_timeline_wait(fake_timeline *t, int after, int before) {
    join(&t->streams[after], &t->streams[before]);
    join(&t->streams[after], &t->streams[HOST]);
}

void fake_operator(fake_buffer *buffer, bool write, const char *name) {
    const void *memory = fake_use(buffer, false);
    fake_timeline_access(&device.timeline, device.current, memory, write, name);
}

/* The host's functions. An event is a clock. */

/* The work that was on a stream when the event was recorded, and the graph that it is in. */
typedef struct fake_event {
    fake_clock clock;
    uint64_t capture;
} fake_event;

static of_stream current(void *ctx, int ordinal) {
    (void)ctx;
    return (of_stream){ordinal, device.current, device.capture[device.current]};
}

static void exchange(void *ctx, const of_stream *stream) {
    (void)ctx;
    device.current = (int)stream->id;
}

static void use_all(const of_gpu_update *update, const of_gpu_entry *entry, int stream) {
    fake_timeline_access(&device.timeline, stream, entry->param, true, "the update");
    if (update->factor_at)
        fake_timeline_access(&device.timeline, stream, update->factor_at, false, "the update");
    fake_timeline_access(&device.timeline, stream, entry->grad, false, "the update");
    if (entry->step_at) {
        fake_timeline_access(&device.timeline, stream, entry->step_at, false, "the update");
        ck_assert_double_eq((double)*entry->step_at + 1, entry->step);
    }
    for (size_t i = 0; i < OF_MAX_STATE; i++)
        if (entry->state[i])
            fake_timeline_access(&device.timeline, stream, entry->state[i], true, "the update");
}

static void multiply(const of_gpu_update *update, const of_gpu_entry *entry) {
    const double factors[OF_MAX_FACTORS] = {(double)*(const float *)update->factor_at, 1.0};
    of_scale_find(update->dtype, OF_ISA_C)(entry->param, entry->grad, entry->n, factors);
}

/* With the CPU's kernel, so that the fixture's yardstick holds here too. */
static void compute(const of_gpu_update *update, const of_gpu_entry *entry) {
    if (strcmp(update->rule, "scaling") == 0) {
        multiply(update, entry);
        return;
    }
    const of_rule *rule = of_rule_find(update->rule);
    const of_kernel *kernel =
        of_kernel_find(update->rule, OF_REF_CPU_FUSED, update->dtype, OF_CPU, of_isa_detect());
    _Alignas(16) unsigned char scalars[OF_MAX_SCALARS];
    of_count count = {.step = entry->step};
    rule->prepare(update->hyper, &count, scalars);
    of_span span = {.param = entry->param, .grad = entry->grad, .n = entry->n};
    memcpy(span.state, entry->state, sizeof span.state);
    span.tail = of_tail(rule, OF_REF_CPU_FUSED, update->dtype, 32, entry->n);
    const double factors[OF_MAX_FACTORS] = {
        update->factor_at ? (double)*(const float *)update->factor_at : 1.0, 1.0};
    if (update->factor_at)
        span.factors = factors;
    if (entry->n)
        kernel->run(&span, scalars);
}

static bool launch(void *ctx, const of_stream *stream, of_gpu_update *update,
                   const of_gpu_entry *entries, size_t n) {
    (void)ctx;
    const int id = (int)stream->id;
    if (++device.launches == device.fail_launch || device.capture[id] != stream->capture) {
        of_set_error("the device is broken");
        return false;
    }
    device.entries = (int)n;
    device.last_stream = id;
    for (size_t i = 0; i < n; i++) {
        compute(update, &entries[i]);
        use_all(update, &entries[i], id);
    }
    return true;
}

static bool count(void *ctx, const of_stream *stream, float *const *steps, size_t n,
                  const float *less_at) {
    (void)ctx;
    device.counts++;
    for (size_t i = 0; i < n; i++) {
        fake_timeline_access(&device.timeline, (int)stream->id, steps[i], true, "the count");
        *steps[i] += 1.0f;
        *steps[i] -= less_at ? *less_at : 0.0f;
    }
    return true;
}

static bool record(void *ctx, const of_stream *stream, void **event) {
    (void)ctx;
    if (device.fails_to_record || device.capture[stream->id] != stream->capture) {
        of_set_error("stream %d is %s", (int)stream->id,
                     device.fails_to_record ? "broken" : "capturing");
        return false;
    }
    if (!*event) {
        *event = aligned_alloc(64, (sizeof(fake_event) + 63) / 64 * 64);
        device.events++;
    }
    *(fake_event *)*event =
        (fake_event){device.timeline.streams[stream->id], device.capture[stream->id]};
    return true;
}

/* A stream that is being captured can wait for nothing from outside. */
static bool wait(void *ctx, const of_stream *stream, void *event) {
    (void)ctx;
    const fake_event *from = event;
    device.waits++;
    if (device.capture[stream->id] != 0 && from->capture != device.capture[stream->id]) {
        device.spoiled = true;
        of_set_error("dependency created on uncaptured work in another stream");
        return false;
    }
    join(&device.timeline.streams[stream->id], &from->clock);
    return true;
}

static bool is_done(void *ctx, void *event) {
    (void)ctx;
    device.asked++;
    if (!device.busy)
        join(&device.timeline.streams[HOST], &((const fake_event *)event)->clock);
    return !device.busy;
}

static bool synchronize(void *ctx, void *event) {
    (void)ctx;
    if (device.fails_to_synchronize) {
        of_set_error("the device is broken");
        return false;
    }
    device.synchronized++;
    join(&device.timeline.streams[HOST], &((const fake_event *)event)->clock);
    return true;
}

static void destroy(void *ctx, void *event) {
    (void)ctx;
    device.events--;
    free(event);
}

of_stream fake_home(void) {
    const int id = device.side < 0 ? device.current : device.side;
    return (of_stream){0, id, device.capture[id]};
}

fixture *setup_on_device(of_mode mode, size_t bucket_bytes) {
    static const of_gpu_host functions = {sizeof functions, current, exchange,    count,  launch,
                                          record,           wait,    is_done, synchronize, destroy};
    fake_host *host = fake_host_new();
    ck_assert_int_eq(device.events, 0);
    device = (fake_device){.busy = true, .side = -1};
    host->table.gpu = &functions;
    return setup_with(host, mode, bucket_bytes);
}

twin *add_on_device(fixture *f, int64_t numel, size_t group) {
    twin *t = add_to_group(f, numel, group);
    t->tensor->device = OF_CUDA;
    return t;
}

void add_some_on_device(fixture *f, size_t n, int64_t numel) {
    for (size_t i = 0; i < n; i++)
        add_on_device(f, numel, 0);
}

twin *updated_on_device(fixture *f, int64_t numel) {
    twin *t = add_on_device(f, numel, 0);
    backward(t);
    step(f);
    return t;
}

twin *scaled_on_device(fixture *f, int64_t numel) {
    const float one = 1;
    bool scaled = false;
    twin *t = add_on_device(f, numel, 0);
    backward(t);
    t->tensor->factor = fake_buffer_new(sizeof one);
    memcpy(t->tensor->factor->data, &one, sizeof one);
    OK(of_plan_scale(f->plan, t->slot, NAN, NAN, &scaled));
    ck_assert(scaled);
    return t;
}

void look_at_gradient(const twin *t) {
    fake_operator(t->tensor->grad, false, "a look at the gradient");
}

void go_to_stream(int stream) {
    fake_timeline_wait(&device.timeline, stream, 0);
    device.current = stream;
}

void use_there(const twin *t) {
    fake_operator(t->tensor->param, false, "use");
}

void expect_no_race(void) {
    ck_assert_msg(device.timeline.races == 0, "%d races, first: %s", device.timeline.races,
                  device.timeline.first_race);
}

void teardown_on_device(fixture *f) {
    memset(device.capture, 0, sizeof device.capture);
    expect_no_race();
    for (size_t i = 0; i < f->n; i++) {
        fake_buffer_release(f->twins[i].tensor->factor);
        f->twins[i].tensor->factor = NULL;
    }
    teardown(f);
    ck_assert_int_eq(device.events, 0);
}
