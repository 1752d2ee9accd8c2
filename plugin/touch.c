/* SPDX-License-Identifier: BSD-3-Clause */
/* touch.c: first use. Someone is about to access memory on which an update may
 * be pending. */
#include "internal.h"

static bool waits_on(const of_update *update, const void *key) {
    if (!update->pending)
        return false;
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

/* Between the look-up and the lock another thread may have launched the
 * update, and its record may serve another one by now. */
static bool launch_found(of_update *update, const void *key, bool foreign) {
    of_plan *plan = update->plan;
    of_list done = {0};
    bool stopped = false;
    pthread_mutex_lock(&plan->lock);
    bool found = waits_on(update, key);
    if (found) {
        of_launch_one(plan, update, OF_AT_USE, &done);
        stopped = note_thread(plan, foreign);
    }
    pthread_mutex_unlock(&plan->lock);
    if (stopped)
        of_log(&plan->host, OF_LOG_INFO,
               "another thread used a pending parameter: from now on step() updates at once");
    of_updates_release(plan, &done);
    of_plan_unref(plan);
    return found;
}

bool of_launch_at(const void *key, bool foreign) {
    while (of_any_pending()) {
        of_update *update = of_registry_find(key);
        if (!update)
            return false;
        if (launch_found(update, key, foreign))
            return true;
    }
    return false;
}

/* The update goes first: it reads the gradient as it was when it was created. */
bool of_touch(const void *key, bool foreign) {
    bool updated = of_launch_at(key, foreign);
    bool scaled = OF_GUARD(unread) && of_is_scaled(key) && of_launch_at(of_scale_key(key), foreign);
    return updated || scaled;
}

static void flush(of_plan *plan, bool scalings) {
    of_list done = {0};
    pthread_mutex_lock(&plan->lock);
    of_launch(plan, &plan->pending, OF_AT_CLOSE, &done);
    if (scalings)
        of_launch_scalings(plan, &done);
    pthread_mutex_unlock(&plan->lock);
    of_updates_release(plan, &done);
}

void of_plan_launch(of_plan *plan) {
    flush(plan, false);
}

void of_plan_flush(of_plan *plan) {
    flush(plan, true);
}
