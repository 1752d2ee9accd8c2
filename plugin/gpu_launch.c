/* SPDX-License-Identifier: BSD-3-Clause */
/* gpu_launch.c: launches updates that are on a device. Those of one stream, dtype
 * and set of scalars go in one call of the host. */
#include <string.h>

#include "gpu_update.h"
#include "internal.h"

enum { CALL_ENTRIES = 512 }; /* and step counters, in one call of the host, on the stack */

static bool goes_in_one_call(const of_update *a, const of_update *b) {
    return of_stream_equal(&a->in.stream, &b->in.stream) &&
           of_stream_equal(&a->in.ready, &b->in.ready) && a->in.dtype == b->in.dtype &&
           a->in.mixed == b->in.mixed && a->in.lr_at == b->in.lr_at &&
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

static of_gpu_entry entry_of(const of_inputs *in) {
    of_gpu_entry entry = {.param = in->param,
                           .grad = (void *)(uintptr_t)in->grad,
                           .n = (size_t)in->numel,
                           .step_at = in->step_at,
                           .step = in->count.step};
    memcpy(entry.state, in->state, sizeof entry.state);
    memcpy(entry.numbers_at, in->numbers_at, sizeof entry.numbers_at);
    return entry;
}

static bool is_counted_with(const of_update *first, const of_update *u) {
    return u->in.step_at && !u->counted && of_stream_equal(&u->in.stream, &first->in.stream) &&
           of_stream_equal(&u->in.ready, &first->in.ready);
}

static size_t take_steps(const of_update *first, const of_list *list, float **steps, size_t n) {
    for (of_update *u = list->first; u && n < CALL_ENTRIES; u = u->next)
        if (is_counted_with(first, u)) {
            u->counted = true;
            steps[n++] = u->in.step_at;
        }
    return n;
}

/* Counts the steps of a call and those of later updates, so that one launch counts all
 * updates of a step(), not one launch for each bucket. A pending update launches before anyone
 * reads its counter. */
static bool count_steps(of_plan *plan, const of_list *call, const of_list *later) {
    float *steps[CALL_ENTRIES];
    const of_update *first = call->first;
    size_t n = take_steps(first, call, steps, 0);
    if (n == 0)
        return true;
    n = take_steps(first, later, steps, n);
    n = take_steps(first, &plan->pending[OF_UPDATES], steps, n);
    return plan->host.gpu->count(plan->host.ctx, &first->in.stream, steps, n, NULL);
}

/* As stock does: a flag of 1 takes the step back, and a sum of flags of several devices, which
 * skips no update, more than that. */
static bool subtract_flag(of_plan *plan, const of_list *call) {
    float *steps[CALL_ENTRIES];
    const of_update *first = call->first;
    size_t n = 0;
    for (const of_update *u = first; u && first->in.found_inf_at; u = u->next)
        if (u->in.step_at)
            steps[n++] = u->in.step_at;
    return n == 0 || plan->host.gpu->count(plan->host.ctx, &first->in.stream, steps, n,
                                           first->in.found_inf_at);
}

static size_t entries_of(const of_list *call, of_gpu_entry *entries) {
    size_t n = 0;
    for (const of_update *u = call->first; u; u = u->next)
        if (!u->gone)
            entries[n++] = entry_of(&u->in);
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
                             .program = first->kind->is_update ? first->in.program : NULL};
    return plan->host.gpu->launch(plan->host.ctx, &first->in.stream, &update, entries, n);
}

/* later: what is launched after this call. */
static bool run(of_plan *plan, const of_list *call, const of_list *later) {
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
    return count_steps(plan, call, later) && run_kernels(plan, call, entries, n) &&
           subtract_flag(plan, call);
}

/* Those that were pending stay in the registry, in flight. */
static void settle(of_plan *plan, of_list *call, of_list *done) {
    void (*const settle_one)(void *, void *, bool) = plan->settle[call->first->kind->index];
    of_list finished = {0};
    for (of_update *u = call->first, *next; u; u = next) {
        next = u->next;
        if (!u->deferred || u->gone || !of_queue_add(plan, u)) {
            of_list_append(&finished, u);
            continue;
        }
        settle_one(plan->host.ctx, u->in.references, true);
        u->pending = u->deferred = false;
        of_list_append(done, u);
    }
    if (finished.first)
        of_settle(plan, &finished, done);
}

void of_gpu_launch(of_plan *plan, of_list *list, of_list *done) {
    while (list->first) {
        of_list call = take_call(list);
        if (!run(plan, &call, list))
            of_plan_fail(plan);
        settle(plan, &call, done);
    }
}
