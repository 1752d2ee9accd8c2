/* SPDX-License-Identifier: BSD-3-Clause */
/* launch.c: where a list of updates is launched: by kernels on the CPU, on a device or by
 * the host's operators; and which of its neighbours an update takes along. */
#include "internal.h"

static void count(of_plan *plan, const of_list *list, of_reason reason) {
    if (!list->first->kind->is_update)
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

static of_list take(of_list *list, bool is_taken(of_update *)) {
    of_list taken = {0};
    for (of_update *u = list->first, *next; u; u = next) {
        next = u->next;
        if (!is_taken(u))
            continue;
        of_list_remove(list, u);
        of_list_append(&taken, u);
    }
    return taken;
}

static bool is_by_host(of_update *update) {
    return of_is_by_host(update);
}

static bool is_on_a_device(of_update *update) {
    return update->in.device != OF_CPU;
}

static bool is_missing(of_update *update) {
    return of_is_missing(update->plan, update);
}

static void *watch(of_plan *plan, const of_list *list) {
    const of_host *host = &plan->host;
    if (!host->watch || !list->first->kind->is_update)
        return NULL;
    return host->watch(host->ctx, list->first->in.references, list->count);
}

static void unwatch(of_plan *plan, void *watched) {
    if (watched)
        plan->host.unwatch(plan->host.ctx, watched);
}

static void launch_on_cpu(of_plan *plan, of_list *list, of_list *done) {
    if (!list->first)
        return;
    void *watched = watch(plan, list);
    of_cpu_launch(plan, list);
    unwatch(plan, watched);
    of_settle(plan, list, done);
}

static bool has_product(const of_list *list) {
    const of_update *u = list->first;
    while (u && !u->in.product)
        u = u->next;
    return u != NULL;
}

static void launch_products(of_plan *plan, of_list *list, of_list *done) {
    if (!list->first)
        return;
    void *watched = watch(plan, list);
    if (!of_product_launch(plan, list))
        of_plan_fail(plan);
    unwatch(plan, watched);
    of_settle(plan, list, done);
}

static void launch_by_host(of_plan *plan, of_list *list, of_list *done) {
    if (!list->first)
        return;
    void *watched = watch(plan, list);
    if (!of_apply(plan, list))
        of_plan_fail(plan);
    unwatch(plan, watched);
    of_settle(plan, list, done);
}

void of_launch(of_plan *plan, of_list *list, of_reason reason, of_list *done) {
    if (!list->first)
        return;
    count(plan, list, reason);
    if (plan->host.gpu) {
        of_list elsewhere = take(list, is_on_a_device);
        if (elsewhere.first)
            of_gpu_launch(plan, &elsewhere, done);
        if (!list->first)
            return;
    }
    const bool is_update = list->first->kind->is_update;
    plan->counts.launches += is_update;
    const bool perhaps = is_update && plan->rule->runs_programs;
    of_list by_host = perhaps ? take(list, is_by_host) : (of_list){0};
    if (is_update && has_product(list)) {
        of_list products = of_take_products(plan, list);
        launch_products(plan, &products, done);
    }
    launch_on_cpu(plan, list, done);
    launch_by_host(plan, &by_host, done);
}

void of_launch_one(of_plan *plan, of_update *update, of_reason reason, of_list *done) {
    of_list one = {0};
    if (update->kind->prepare)
        update->kind->prepare(plan, update);
    if (update->pending)
        of_list_remove(&plan->pending[update->kind->index], update);
    of_list_append(&one, update);
    of_launch(plan, &one, reason, done);
}

void of_launch_pending(of_plan *plan, int kind, of_list *done) {
    of_list *list = &plan->pending[kind];
    for (of_update *u = list->first; u && u->kind->prepare; u = u->next)
        u->kind->prepare(plan, u);
    of_list missing = take(list, is_missing);
    of_launch(plan, list, OF_AT_CLOSE, done);
    *list = missing;
}

/* On the CPU what is large enough for all threads goes alone, just before its use. Nobody waits
 * for the gradient of a neighbour. */
static bool goes_with(const of_update *first, of_update *u) {
    if (u->in.device != first->in.device)
        return false;
    if (u->in.device != OF_CPU)
        return of_stream_equal(&u->in.stream, &first->in.stream);
    return !of_is_by_host(u) && first->in.numel < OF_SERIAL_ELEMENTS &&
           u->in.numel < OF_SERIAL_ELEMENTS && !(u->in.awaits && of_is_missing(u->plan, u));
}

/* On one thread: what all its updates read and write stays in the core's own cache, so that what is
 * used next is still there. */
static const size_t bytes_on_one_thread = (size_t)64 << 10;

/* Bytes. In backward mode the others on the side stream wait on without the one that is used. */
static size_t bucket_at_use(const of_plan *plan, const of_update *first) {
    const of_host *host = &plan->host;
    const size_t bytes = plan->bucket_bytes[first->in.device];
    if (plan->mode == OF_BACKWARD)
        return 0;
    if (first->in.device == OF_CPU && host->threads && host->threads(host->ctx) == 1)
        return bytes < bytes_on_one_thread ? bytes : bytes_on_one_thread;
    return bytes;
}

/* Whoever is next in the plan is likely to be used next. */
static void launch_bucket(of_plan *plan, of_update *first, of_list *done) {
    const size_t enough = bucket_at_use(plan, first);
    of_list bucket = {0};
    for (of_update *u = first, *next; u && (u == first || goes_with(first, u)); u = next) {
        next = u->next;
        of_list_remove(&plan->pending[OF_UPDATES], u);
        of_list_append(&bucket, u);
        if (bucket.bytes >= enough)
            break;
    }
    of_launch(plan, &bucket, OF_AT_USE, done);
}

const of_kind of_update_kind = {
    .index = OF_UPDATES, .is_update = true, .run = of_run_kernel, .use = launch_bucket};

void of_discard_pending(of_plan *plan, of_list *done) {
    if (plan->pending[OF_UPDATES].first)
        of_settle(plan, &plan->pending[OF_UPDATES], done);
}
