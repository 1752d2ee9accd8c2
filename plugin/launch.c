/* SPDX-License-Identifier: BSD-3-Clause */
/* launch.c: runs the kernels of a list of updates.
 *
 * All elements of the list form one flat space of chunks, which the host's
 * parallel_for splits over its threads: a launch is one parallel region
 * whatever the number and the sizes of its updates (two, if it is a trial of
 * stores.h). Chunks are whole cache lines of every dtype, so a reference's
 * vectors are never cut, and the kernels give the same bits however the space
 * is split. */
#include <string.h>

#include "floating.h"
#include "internal.h"

enum { CHUNK_SHIFT = 11, CHUNK_ELEMENTS = 1 << CHUNK_SHIFT };

static void *advance(const void *base, size_t bytes) {
    return base ? (char *)(uintptr_t)base + bytes : NULL;
}

/* What one parallel region runs: its chunks from `begin` on. */
typedef struct of_region {
    const of_update *first; /* of the launch's list */
    int64_t begin;
    bool past_caches; /* of_span.past_caches */
} of_region;

/* Chunks [from, to) of one update. */
static void run_update(const of_update *update, int64_t from, int64_t to, bool past_caches) {
    const of_inputs *in = &update->in;
    size_t numel = (size_t)in->numel;
    size_t begin = (size_t)from << CHUNK_SHIFT;
    size_t end = (size_t)to << CHUNK_SHIFT;
    if (end > numel)
        end = numel;
    size_t offset = begin * of_dtype_size(in->dtype);
    if (update->scaling) {
        void *gradient = advance(in->param, offset);
        update->scale(gradient, gradient, end - begin, update->factors);
        return;
    }
    of_span span = {.param = advance(in->param, offset), .grad = advance(in->grad, offset)};
    for (size_t i = 0; i < OF_MAX_STATE; i++)
        span.state[i] = advance(in->state[i], offset);
    span.n = end - begin;
    if (end == numel)
        span.tail = of_tail(update->plan->rule, update->plan->reference, in->dtype,
                            update->plan->vector_bytes, numel);
    if (update->n_factors && OF_GUARD(factors))
        span.factors = update->factors;
    span.square_roots = update->plan->host.square_roots[in->dtype == OF_FLOAT64];
    span.past_caches = past_caches;
    update->kernel->run(&span, update->scalars);
}

/* Chunks [begin, end) of a region. The host's threads and whoever uses a pending parameter
 * may have another setting than the thread that called step(). */
static void run_chunks(void *arg, int64_t begin, int64_t end) {
    const of_region *region = arg;
    const unsigned outside = of_floating_now();
    unsigned inside = outside;
    begin += region->begin;
    end += region->begin;
    for (const of_update *u = region->first; u && u->first_chunk < end; u = u->next) {
        int64_t from = begin > u->first_chunk ? begin - u->first_chunk : 0;
        int64_t to = end - u->first_chunk < u->n_chunks ? end - u->first_chunk : u->n_chunks;
        if (from >= to)
            continue;
        if (u->floating != inside && OF_GUARD(floating))
            of_floating_set(inside = u->floating);
        run_update(u, from, to, region->past_caches);
    }
    if (inside != outside)
        of_floating_set(outside);
}

/* The host's threads do not survive a fork, and to start them in the child may hang (GNU's
 * OpenMP). There updates share no threads that each by itself would not use. */
static bool is_serial(int64_t elements, int64_t largest) {
    return (of_is_forked() ? largest : elements) < OF_SERIAL_ELEMENTS;
}

/* Chunks [begin, end) of the list that starts with arg, on several threads. */
static void run_region(void *arg, int64_t begin, int64_t end, bool past_caches) {
    const of_update *first = arg;
    const of_host *host = &first->plan->host;
    of_region region = {first, begin, past_caches};
    host->parallel_for(host->ctx, end - begin, run_chunks, &region);
}

/* Whether other threads have what a launch of kernels stores. */
static bool is_shared(const of_plan *plan) {
    return plan->mode == OF_BACKWARD && !plan->rule->by_host &&
           !(plan->host.threads && plan->host.threads(plan->host.ctx) == 1);
}

bool of_goes_past_caches_now(const of_plan *plan) {
    return is_shared(plan) && of_stores_are_past(&plan->stores);
}

static void run_list(of_plan *plan, of_list *list) {
    int64_t chunks = 0;
    int64_t elements = 0;
    int64_t largest = 0;
    for (of_update *u = list->first; u; u = u->next) {
        largest = u->in.numel > largest ? u->in.numel : largest;
        u->first_chunk = chunks;
        u->n_chunks = (u->in.numel + CHUNK_ELEMENTS - 1) >> CHUNK_SHIFT;
        chunks += u->n_chunks;
        elements += u->in.numel;
    }
    if (is_serial(elements, largest))
        run_chunks(&(of_region){list->first, 0, of_goes_past_caches_now(plan)}, 0, chunks);
    else if (is_shared(plan))
        of_stores_run(&plan->stores, chunks, run_region, list->first);
    else
        run_region(list->first, 0, chunks, false);
}

bool of_apply(of_plan *plan, of_update *update) {
    const unsigned outside = of_floating_now();
    double hyper[OF_MAX_HYPER];
    memcpy(hyper, update->scalars, sizeof hyper);
    if (OF_GUARD(floating))
        of_floating_set(update->floating);
    const bool done = plan->host.apply(plan->host.ctx, &update->in, hyper);
    of_floating_set(outside);
    return done;
}

static void apply_list(of_plan *plan, of_list *list) {
    for (of_update *u = list->first; u; u = u->next)
        if (!of_apply(plan, u)) {
            of_plan_fail(plan);
            return;
        }
}

static void count(of_plan *plan, const of_list *list, of_reason reason) {
    if (list->first->scaling)
        return;
    switch (reason) {
    case OF_AT_ONCE:
        plan->counts.at_once += list->count;
        break;
    case OF_AT_USE:
        plan->counts.at_use += list->count;
        break;
    case OF_AT_CLOSE:
        plan->counts.at_close += list->count;
        break;
    }
}

/* The host lifts its marks before the keys go: a thread that still sees a mark
 * finds the key, waits for this plan's lock, and is then right to go on. */
void of_settle(of_plan *plan, of_list *list, of_list *done) {
    for (of_update *u = list->first; u; u = u->next)
        plan->host.settle(plan->host.ctx, u->in.hold, u->deferred);
    of_registry_remove(list);
    for (of_update *u = list->first, *next; u; u = next) {
        next = u->next;
        u->pending = u->deferred = false;
        of_list_append(done, u);
    }
    *list = (of_list){0};
}

static of_list take_those_on_devices(of_list *list) {
    of_list taken = {0};
    for (of_update *u = list->first, *next; u; u = next) {
        next = u->next;
        if (u->in.device == OF_CPU)
            continue;
        of_list_remove(list, u);
        of_list_append(&taken, u);
    }
    return taken;
}

void of_launch(of_plan *plan, of_list *list, of_reason reason, of_list *done) {
    if (!list->first)
        return;
    count(plan, list, reason);
    if (plan->host.device) {
        of_list elsewhere = take_those_on_devices(list);
        of_device_launch(plan, &elsewhere, done);
    }
    if (!list->first)
        return;
    plan->counts.launches += !list->first->scaling;
    if (plan->rule->by_host && !list->first->scaling)
        apply_list(plan, list);
    else
        run_list(plan, list);
    of_settle(plan, list, done);
}

void of_launch_one(of_plan *plan, of_update *update, of_reason reason, of_list *done) {
    of_list one = {0};
    if (update->scaling)
        of_scaling_prepare(plan, update);
    if (update->pending)
        of_list_remove(update->scaling ? &plan->scalings : &plan->pending, update);
    of_list_append(&one, update);
    of_launch(plan, &one, reason, done);
}

/* On the CPU what is large enough for all threads goes alone, just before its use. */
static bool goes_with(const of_update *first, const of_update *u) {
    if (u->in.device != first->in.device)
        return false;
    if (u->in.device != OF_CPU)
        return of_stream_equal(&u->in.stream, &first->in.stream);
    return !u->plan->rule->by_host && first->in.numel < OF_SERIAL_ELEMENTS &&
           u->in.numel < OF_SERIAL_ELEMENTS;
}

/* Bytes. In backward mode the open bucket goes on filling without the one that is used. */
static size_t bucket_at_use(const of_plan *plan, const of_update *first) {
    const of_host *host = &plan->host;
    if (plan->mode == OF_BACKWARD)
        return 0;
    if (first->in.device == OF_CPU && host->threads && host->threads(host->ctx) == 1)
        return 0; /* what is used next is still in the cache */
    return plan->bucket_bytes[first->in.device];
}

/* Whoever is next in the plan is likely to be used next. */
void of_launch_bucket(of_plan *plan, of_update *first, of_list *done) {
    const size_t enough = bucket_at_use(plan, first);
    of_list bucket = {0};
    if (first->scaling) {
        of_launch_scalings_with(plan, first, done);
        return;
    }
    for (of_update *u = first, *next; u && (u == first || goes_with(first, u)); u = next) {
        next = u->next;
        of_list_remove(&plan->pending, u);
        of_list_append(&bucket, u);
        if (bucket.bytes >= enough)
            break;
    }
    of_launch(plan, &bucket, OF_AT_USE, done);
}

void of_discard_pending(of_plan *plan, of_list *done) {
    of_settle(plan, &plan->pending, done);
}
