/* SPDX-License-Identifier: BSD-3-Clause */
/* gpu_launch.c: launches updates that are on a device. Those of one stream, dtype
 * and set of scalars go in one call of the host. */
#include <string.h>

#include "gpu_update.h"
#include "internal.h"

enum { CALL_ENTRIES = 512 }; /* and their step counters, on the stack */

static bool goes_in_one_call(const of_update *a, const of_update *b) {
    return of_stream_equal(&a->in.stream, &b->in.stream) &&
           of_stream_equal(&a->in.ready, &b->in.ready) && a->in.dtype == b->in.dtype &&
           a->in.mixed == b->in.mixed && a->in.wide == b->in.wide && a->in.lr_at == b->in.lr_at &&
           a->in.grad_scale_at == b->in.grad_scale_at &&
           a->in.found_inf_at == b->in.found_inf_at && a->in.factor_at == b->in.factor_at &&
           a->kind == b->kind &&
           memcmp(a->scalars, b->scalars, OF_MAX_HYPER * sizeof(double)) == 0;
}

static of_list take_call(of_list *list) {
    of_list call = {0};
    for (of_update *u = list->first, *next; u && call.count < CALL_ENTRIES; u = next) {
        next = u->next;
        if (call.first && !goes_in_one_call(call.first, u))
            continue;
        of_list_remove(list, u);
        of_list_append(&call, u);
    }
    return call;
}

static of_gpu_entry entry_of(const of_update *update) {
    const of_inputs *in = &update->in;
    of_gpu_entry entry = {.param = in->param,
                           .grad = (void *)(uintptr_t)in->grad,
                           .n = (size_t)in->numel,
                           .step_at = in->step_at,
                           .step = in->count.step,
                           .parameter = (uint32_t)update->slot};
    memcpy(entry.state, in->state, sizeof entry.state);
    memcpy(entry.numbers_at, in->numbers_at, sizeof entry.numbers_at);
    return entry;
}

/* The updates read the number of the one before, so that one launch behind them counts all
 * of a pass or step(). Where a flag may take the step back it is read now, as the updates do; a
 * sum of flags of several devices, which skips no update, takes back more than that, as in stock. */
static bool count_steps(of_plan *plan, const of_list *call) {
    float *steps[CALL_ENTRIES];
    const of_inputs *first = &call->first->in;
    size_t n = 0;
    for (const of_update *u = call->first; u; u = u->next)
        if (u->in.step_at)
            steps[n++] = u->in.step_at;
    if (n == 0 || (!first->found_inf_at && of_queue_count_later(plan, &first->stream, steps, n)))
        return true;
    return plan->host.gpu->count(plan->host.ctx, &first->stream, steps, n, first->found_inf_at);
}

static size_t entries_of(const of_list *call, of_gpu_entry *entries) {
    size_t n = 0;
    for (const of_update *u = call->first; u; u = u->next)
        if (!u->gone)
            entries[n++] = entry_of(u);
    return n;
}

static const char *kernels_of(const of_plan *plan, const of_update *update) {
    if (update->kind->gpu_rule)
        return update->kind->gpu_rule;
    return update->in.mixed ? of_rule_mixed(plan->rule) : plan->rule->name;
}

static bool run_kernels(of_plan *plan, const of_list *call, const of_gpu_entry *entries,
                        size_t n) {
    const of_update *first = call->first;
    double hyper[OF_MAX_HYPER];
    memcpy(hyper, first->scalars, sizeof hyper);
    of_gpu_update update = {.rule = kernels_of(plan, first),
                             .dtype = first->in.dtype,
                             .hyper = hyper,
                             .lr_at = first->in.lr_at,
                             .grad_scale_at = first->in.grad_scale_at,
                             .found_inf_at = first->in.found_inf_at,
                             .factor_at = first->in.factor_at,
                             .program = first->kind->is_update ? first->in.program : NULL,
                             .wide_state = first->in.wide};
    return plan->host.gpu->launch(plan->host.ctx, &first->in.stream, &update, entries, n);
}

static void end_reading(const of_list *call) {
    for (const of_update *u = call->first; u && call->first->in.factor_at; u = u->next)
        of_registry_end_reading(u->in.grad_key);
}

static bool run(of_plan *plan, const of_list *call) {
    of_gpu_entry entries[CALL_ENTRIES];
    const of_update *first = call->first;
    const size_t n = entries_of(call, entries);
    if (n == 0)
        return true;
    plan->counts.launches += first->kind->is_update;
    if (!of_stream_order(plan, &first->in.ready, &first->in.stream))
        return false;
    if (first->kind->is_update && of_is_by_host(first))
        return of_apply(plan, call);
    if (!run_kernels(plan, call, entries, n) || !count_steps(plan, call))
        return false;
    if (first->kind->is_update)
        end_reading(call);
    return true;
}

/* Those that were pending stay in the registry, in flight. */
static void settle(of_plan *plan, of_list *call, of_list *done) {
    void (*const settle_one)(void *, void *, bool) = plan->settle[call->first->kind->index];
    const bool beside = !of_stream_equal(&call->first->in.stream, &call->first->in.ready);
    of_list finished = {0}, held = {0};
    for (of_update *u = call->first, *next; u; u = next) {
        next = u->next;
        if (!u->deferred || u->gone || !of_queue_add(plan, u)) {
            of_list_append(&finished, u);
            continue;
        }
        settle_one(plan->host.ctx, u->in.references, true);
        u->pending = u->deferred = false;
        of_list_append(beside ? &held : done, u);
    }
    if (held.first)
        of_queue_hold(plan, &held, done);
    if (finished.first)
        of_settle(plan, &finished, done);
}

void of_gpu_launch(of_plan *plan, of_list *list, of_list *done) {
    while (list->first) {
        of_list call = take_call(list);
        if (!run(plan, &call))
            of_plan_fail(plan);
        settle(plan, &call, done);
    }
    if (plan->mode != OF_BACKWARD || !plan->passes) /* inside them stock has not counted yet */
        of_count_steps(plan);
}
