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
    const size_t state_offset = in->wide ? begin * sizeof(float) : offset;
    of_span span = {.param = advance(in->param, offset),
                    .grad = grad,
                    .first = begin,
                    .parameter = (uint32_t)update->slot,
                    .wide_state = in->wide};
    for (size_t i = 0; i < OF_FORMULA_STATE; i++)
        span.state[i] = advance(in->state[i], state_offset);
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
    return plan->mode != OF_FORWARD &&
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

/* Programs that run side by side: all their chunks are one flat space. */
typedef struct of_parts {
    const of_plan *plan;
    const of_part *parts;
    size_t n;
    unsigned floating; /* of the thread that runs them */
} of_parts;

static int64_t chunks_of(const of_part *part) {
    return (part->numel + CHUNK_ELEMENTS - 1) >> CHUNK_SHIFT;
}

/* Chunks [from, to) of one. */
static void run_program(const of_plan *plan, const of_part *part, int64_t from, int64_t to) {
    const size_t numel = (size_t)part->numel;
    const size_t begin = (size_t)from << CHUNK_SHIFT, end = (size_t)to << CHUNK_SHIFT;
    const size_t offset = begin * of_dtype_size(part->dtype);
    of_span span = {.param = advance(part->memory[OF_REGISTER_PARAM], offset),
                    .grad = advance(part->memory[OF_REGISTER_GRAD], offset),
                    .n = (end < numel ? end : numel) - begin};
    for (size_t i = 0; i < OF_MAX_STATE; i++)
        span.state[i] = advance(part->memory[OF_REGISTER_STATE + i], offset);
    if (end >= numel)
        span.tail = of_tail(plan->rule, plan->reference, part->dtype, plan->vector_bytes, numel);
    span.square_roots = plan->host.square_roots[part->dtype == OF_FLOAT64];
    plan->kernels[part->dtype]->run(&span, &part->program);
}

static void run_parts(void *arg, int64_t begin, int64_t end) {
    const of_parts *all = arg;
    const unsigned outside = of_floating_now();
    if (all->floating != outside)
        of_floating_set(all->floating);
    int64_t first = 0;
    for (const of_part *part = all->parts; part < all->parts + all->n && first < end; part++) {
        const int64_t chunks = chunks_of(part);
        const int64_t from = begin > first ? begin - first : 0;
        const int64_t to = end - first < chunks ? end - first : chunks;
        if (from < to)
            run_program(all->plan, part, from, to);
        first += chunks;
    }
    if (all->floating != outside)
        of_floating_set(outside);
}

of_status of_plan_run_programs(of_plan *plan, const of_part *parts, size_t n) {
    of_parts all = {plan, parts, n, of_floating_now()};
    int64_t chunks = 0, elements = 0, largest = 0;
    for (size_t i = 0; i < n; i++) {
        if (!plan->rule->runs_programs || !parts[i].program || parts[i].program->by_host)
            return of_fail(OF_INVALID, "this plan can't run this program");
        chunks += chunks_of(&parts[i]);
        elements += parts[i].numel;
        largest = parts[i].numel > largest ? parts[i].numel : largest;
    }
    if (is_serial(elements, largest))
        run_parts(&all, 0, chunks);
    else
        plan->host.parallel_for(plan->host.ctx, chunks, run_parts, &all);
    return OF_OK;
}
