/* SPDX-License-Identifier: BSD-3-Clause */
/* access.c: first use. Someone is about to access memory on which an update may
 * be pending. */
#include "internal.h"

static bool has_key(const of_update *update, int kind, const void *key) {
    for (size_t i = 0; i < update->n_registered; i++)
        if (update->in.keys[i] == key)
            return update->kind->index == kind;
    return false;
}

/* Returns whether this turned deferring off. Lock held. */
static bool note_thread(of_plan *plan, bool foreign) {
    if (!foreign || plan->counts.threads_seen)
        return false;
    plan->counts.threads_seen = true;
    if (OF_GUARD(foreign))
        plan->stopped = true;
    return true;
}

/* A CUDA graph must not depend on an update that runs once, outside of the graph; nor may one that
 * was to be in a graph run outside. */
static bool may_use(const of_update *update, const of_stream *user) {
    if (user->capture == update->in.stream.capture || !OF_GUARD(capture))
        return true;
    of_set_error(user->capture != 0
                     ? "a CUDA graph is being captured, and its code uses a parameter, gradient or "
                       "optimizer state with an update from outside of the capture; call "
                       "optfuse.flush() and torch.cuda.synchronize() before the capture"
                     : "an update made inside a CUDA graph capture was left behind by it, whose "
                       "end was not PyTorch's; flush the optimizer before the capture ends");
    return false;
}

/* CUDA can't query an event that was recorded in a capture. */
static bool can_reap(const of_update *update, const of_stream *user) {
    return user->capture != update->in.stream.capture || user->capture == 0;
}

/* Launches what is pending and orders the calling thread's stream after it. */
static of_accessed use_on_device(of_plan *plan, of_update *update, of_list *done) {
    const of_stream user = plan->host.gpu->current(plan->host.ctx, update->in.stream.device);
    if (update->in_flight && can_reap(update, &user)) /* in a capture it is refused, if not done */
        of_queues_reap(plan);
    if (!update->pending && !update->in_flight)
        return OF_NOTHING_PENDING;
    if (!may_use(update, &user))
        return OF_ACCESS_FAILED;
    const of_stream home = update->in.stream;
    if (update->pending)
        update->kind->use(plan, update, done);
    of_count_steps(plan); /* it may be a counter that is used */
    if (of_plan_health(plan) != OF_OK || !of_stream_order(plan, &home, &user))
        return OF_ACCESS_FAILED;
    return OF_IN_FLIGHT;
}

static of_accessed use(of_plan *plan, of_update *update, of_list *done) {
    if (update->in.device != OF_CPU)
        return use_on_device(plan, update, done);
    const bool may_fail = plan->rule->runs_programs || update->in.product;
    update->kind->use(plan, update, done);
    const bool failed = may_fail && of_plan_health(plan) != OF_OK;
    return failed ? OF_ACCESS_FAILED : OF_LAUNCHED;
}

/* Between the look-up and the lock another thread may have launched the
 * update, and its record may serve another one by now. */
static bool is_found(const of_update *update, int kind, const void *key) {
    return (update->pending || update->in_flight) && has_key(update, kind, key);
}

/* False: the update's gradient will never come. Lock held, but while it waits. */
static bool await_gradient(of_plan *plan, of_update *update, int kind, const void *key) {
    bool arrived = true;
    while (arrived && is_found(update, kind, key) && of_is_missing(plan, update))
        arrived = of_await(plan, update->in.awaits);
    return arrived;
}

static of_accessed use_found(of_update *update, int kind, const void *key, bool foreign) {
    of_plan *plan = update->plan;
    of_list done = {0};
    bool stopped = false;
    of_accessed accessed = OF_NOTHING_PENDING;
    pthread_mutex_lock(&plan->lock);
    const bool arrived = await_gradient(plan, update, kind, key);
    const bool pending = update->pending;
    if (!arrived) {
        accessed = OF_ACCESS_FAILED;
    } else if (is_found(update, kind, key)) {
        accessed = use(plan, update, &done);
        stopped = pending && note_thread(plan, foreign);
    }
    pthread_mutex_unlock(&plan->lock);
    if (stopped)
        of_log(&plan->host, OF_LOG_INFO,
               "another thread used a pending parameter: from now on step() updates at once");
    of_updates_release(plan, &done);
    of_plan_unref(plan);
    return accessed;
}

static of_accessed access_kind(int kind, const void *key, bool foreign) {
    of_accessed accessed = OF_NOTHING_PENDING;
    of_update *update;
    while (accessed == OF_NOTHING_PENDING && (update = of_registry_find(kind, key)))
        accessed = use_found(update, kind, key, foreign);
    return accessed;
}

of_accessed of_launch_at(const void *key, bool foreign) {
    return of_registry_has_updates() ? access_kind(OF_UPDATES, key, foreign) : OF_NOTHING_PENDING;
}

of_accessed of_multiply_at(const void *key, bool foreign) {
    return of_any_scaled() ? access_kind(OF_SCALINGS, key, foreign)
                                      : OF_NOTHING_PENDING;
}

/* The update goes first: it reads the gradient as it was when it was created. */
of_accessed of_access(const void *key, bool foreign) {
    if (!of_any_pending())
        return OF_NOTHING_PENDING;
    const of_accessed updated = access_kind(OF_UPDATES, key, foreign);
    if (updated == OF_ACCESS_FAILED || !OF_GUARD(unread) || !of_any_scaled())
        return updated;
    const of_accessed scaled = access_kind(OF_SCALINGS, key, foreign);
    return scaled > updated ? scaled : updated;
}
