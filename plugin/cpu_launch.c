/* SPDX-License-Identifier: BSD-3-Clause */
/* cpu_launch.c: runs the kernels of a list of updates on the CPU, or multiplies gradients.
 *
 * All elements of the list form one flat space of chunks, which the host's
 * parallel_for splits over its threads: a launch is one parallel region
 * whatever the number and the sizes of its updates (two, if it is a trial of
 * store_policy.h). Chunks are whole cache lines of every dtype, so a reference's
 * vectors are never cut, and the kernels give the same bits however the space
 * is split. */
#include <string.h>

#include "floating.h"
#include "internal.h"

enum { CHUNK_SHIFT = 11, CHUNK_ELEMENTS = 1 << CHUNK_SHIFT };

static void *advance(const void *base, size_t bytes) {
    return base ? (char *)(uintptr_t)base + bytes : NULL;
}

/* The work of one parallel region: its chunks from `begin` on. */
typedef struct of_region {
    const of_update *first; /* of the launch's list */
    int64_t begin;
    bool past_caches; /* of_span.past_caches */
} of_region;

/* Makes the average of elements that have just been updated. */
static void run_average(const of_update *update, size_t begin, size_t end) {
    const of_plan *plan = update->plan;
    const of_inputs *in = &update->in;
    const size_t numel = (size_t)in->numel;
    const size_t offset = begin * of_dtype_size(in->dtype);
    of_span span = {.param = advance(update->average.memory, offset),
                    .grad = advance(in->param, offset),
                    .n = end - begin};
    if (end == numel)
        span.tail =
            of_tail(plan->program_rule, plan->reference, in->dtype, plan->vector_bytes, numel);
    span.square_roots = plan->host.square_roots[in->dtype == OF_FLOAT64];
    plan->programs[in->dtype]->run(&span, &update->average.program);
}

static inline __attribute__((always_inline)) void run_with(const of_update *update,
                                                           const void *grad, size_t begin,
                                                           size_t end, bool past_caches) {
    const of_inputs *in = &update->in;
    const size_t numel = (size_t)in->numel;
    const size_t offset = begin * of_dtype_size(in->dtype);
    of_span span = {.param = advance(in->param, offset), .grad = grad};
    for (size_t i = 0; i < OF_FORMULA_STATE; i++)
        span.state[i] = advance(in->state[i], offset);
    if (in->program)
        for (size_t i = OF_FORMULA_STATE; i < OF_MAX_STATE; i++)
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
    if (update->average.program)
        run_average(update, begin, end);
}

void of_run_with(const of_update *update, const void *grad, size_t begin, size_t end,
                 bool past_caches) {
    run_with(update, grad, begin, end, past_caches);
}

void of_run_kernel(const of_update *update, size_t begin, size_t end, bool past_caches) {
    const size_t offset = begin * of_dtype_size(update->in.dtype);
    run_with(update, advance(update->in.grad, offset), begin, end, past_caches);
}

/* Chunks [from, to) of one update. */
static void run_part(const of_update *update, int64_t from, int64_t to, bool past_caches) {
    const size_t numel = (size_t)update->in.numel;
    const size_t end = (size_t)to << CHUNK_SHIFT;
    update->kind->run(update, (size_t)from << CHUNK_SHIFT, end < numel ? end : numel, past_caches);
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
        run_part(u, from, to, region->past_caches);
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
    return plan->mode == OF_BACKWARD && !plan->rule->external &&
           !(plan->host.threads && plan->host.threads(plan->host.ctx) == 1);
}

bool of_goes_past_caches_now(const of_plan *plan) {
    return is_shared(plan) && of_store_policy_is_past(&plan->store_policy);
}

void of_run_stores(of_plan *plan, int64_t n, of_store_fn *run, void *arg) {
    if (is_shared(plan))
        of_store_policy_run(&plan->store_policy, n, run, arg);
    else
        run(arg, 0, n, false);
}

void of_cpu_launch(of_plan *plan, of_list *list) {
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
    else
        of_run_stores(plan, chunks, run_region, list->first);
}

static const of_kind part_kind = {.index = OF_UPDATES, .run = of_run_kernel};

of_status of_plan_run_program(of_plan *plan, const of_inputs *in) {
    if (!plan->rule->runs_programs || !in->program || in->program->by_host || in->device != OF_CPU)
        return of_fail(OF_INVALID, "this plan can't run this program");
    of_update update = {.plan = plan, .kind = &part_kind, .in = *in, .floating = of_floating_now()};
    update.kernel = plan->kernels[in->dtype];
    update.n_chunks = (in->numel + CHUNK_ELEMENTS - 1) >> CHUNK_SHIFT;
    memcpy(update.scalars, &in->program, sizeof in->program);
    if (is_serial(in->numel, in->numel))
        run_chunks(&(of_region){&update, 0, false}, 0, update.n_chunks);
    else
        run_region(&update, 0, update.n_chunks, false);
    return OF_OK;
}
