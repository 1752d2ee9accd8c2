/* SPDX-License-Identifier: BSD-3-Clause */
/* touch.c: first use. Someone is about to access memory on which an update may
 * be pending. */
#include "internal.h"

static bool has_key(const of_update *update, const void *key) {
    for (size_t i = 0; i < update->n_registered; i++)
        if (update->in.keys[i] == key)
            return true;
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

/* A graph must not depend on an update that is made once and outside of it. */
static bool may_use(const of_update *update, const of_stream *user) {
    if (user->capture == update->in.stream.capture || !OF_GUARD(capture))
        return true;
    of_set_error("a CUDA graph is being captured, and its code uses a parameter, gradient or "
                 "optimizer state with an update from outside of the capture; call "
                 "optfuse.flush() and torch.cuda.synchronize() before the capture");
    return false;
}

/* An event that is recorded in a capture can't be asked for. */
static bool can_land(const of_update *update, const of_stream *user) {
    return user->capture != update->in.stream.capture || user->capture == 0;
}

/* Launches what is pending and orders the calling thread's stream after it. */
static of_touched use_on_device(of_plan *plan, of_update *update, of_list *done) {
    const of_device_host *device = plan->host.device;
    const of_stream user = device->current(plan->host.ctx, update->in.stream.device);
    if (update->flying && can_land(update, &user))
        of_lanes_land(plan, true);
    if (!update->pending && !update->flying)
        return OF_UNTOUCHED;
    if (!may_use(update, &user))
        return OF_TOUCH_FAILED;
    const of_stream home = update->in.stream;
    if (update->pending)
        of_launch_bucket(plan, update, done);
    if (of_plan_health(plan) != OF_OK || !of_stream_order(plan, &home, &user))
        return OF_TOUCH_FAILED;
    return OF_IN_FLIGHT;
}

static of_touched use(of_plan *plan, of_update *update, of_list *done) {
    if (update->in.device != OF_CPU)
        return use_on_device(plan, update, done);
    of_launch_bucket(plan, update, done);
    const bool failed = plan->rule->by_host && of_plan_health(plan) != OF_OK;
    return failed ? OF_TOUCH_FAILED : OF_TOUCHED;
}

/* Between the look-up and the lock another thread may have launched the
 * update, and its record may serve another one by now. */
static of_touched use_found(of_update *update, const void *key, bool foreign) {
    of_plan *plan = update->plan;
    of_list done = {0};
    bool stopped = false;
    of_touched touched = OF_UNTOUCHED;
    pthread_mutex_lock(&plan->lock);
    const bool pending = update->pending;
    if ((pending || update->flying) && has_key(update, key)) {
        touched = use(plan, update, &done);
        stopped = pending && note_thread(plan, foreign);
    }
    pthread_mutex_unlock(&plan->lock);
    if (stopped)
        of_log(&plan->host, OF_LOG_INFO,
               "another thread used a pending parameter: from now on step() updates at once");
    of_updates_release(plan, &done);
    of_plan_unref(plan);
    return touched;
}

static of_touched launch_at(const void *key, bool foreign) {
    of_touched touched = OF_UNTOUCHED;
    while (of_any_pending() && touched == OF_UNTOUCHED) {
        of_update *update = of_registry_find(key);
        if (!update)
            break;
        touched = use_found(update, key, foreign);
    }
    return touched;
}

of_touched of_launch_at(const void *key, bool foreign) {
    return of_any_pending() ? launch_at(key, foreign) : OF_UNTOUCHED;
}

/* The update goes first: it reads the gradient as it was when it was created. */
of_touched of_touch(const void *key, bool foreign) {
    if (!of_any_pending()) /* scalings are counted there, too */
        return OF_UNTOUCHED;
    of_touched updated = launch_at(key, foreign);
    if (updated == OF_TOUCH_FAILED || !OF_GUARD(unread) || !of_registry_has_scalings())
        return updated;
    of_touched scaled = launch_at(of_scale_key(key), foreign);
    return scaled > updated ? scaled : updated;
}

/* What is pending goes first: nothing else is launched or waited for then. */
static of_status finish(of_plan *plan, bool scalings, bool wait) {
    of_list done = {0};
    if (scalings)
        of_launch_readers(plan);
    pthread_mutex_lock(&plan->lock);
    of_launch(plan, &plan->pending, OF_AT_CLOSE, &done);
    if (scalings)
        of_launch_scalings(plan, &done);
    of_status status = of_plan_health(plan);
    if (wait ? !of_lanes_drain(plan) : status == OF_OK && !of_lanes_join(plan))
        status = OF_REFUSED;
    if (scalings && !wait) /* for whoever waits for the device himself */
        of_lanes_fence(plan);
    pthread_mutex_unlock(&plan->lock);
    of_updates_release(plan, &done);
    return status;
}

of_status of_plan_launch(of_plan *plan) {
    return finish(plan, false, false);
}

of_status of_plan_flush(of_plan *plan) {
    return finish(plan, true, false);
}

of_status of_plan_drain(of_plan *plan) {
    return finish(plan, true, true);
}
