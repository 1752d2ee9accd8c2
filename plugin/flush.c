/* SPDX-License-Identifier: BSD-3-Clause */
/* flush.c: launches what is pending: of one plan, of all, and before a fork. A child gets a
 * copy of the memory but none of the other threads, so nothing may be pending and no lock held
 * by them when it is made. */
#include "internal.h"

/* Launches pending updates, then scalings. The current streams wait for the launches or, with
 * `wait`, this thread does. A gradient that will never come leaves everything pending. */
static of_status finish(of_plan *plan, bool scalings, bool wait) {
    of_list done = {0};
    if (of_await_pending(plan) != OF_OK)
        return OF_REFUSED;
    if (scalings)
        of_launch_readers(plan);
    pthread_mutex_lock(&plan->lock);
    of_launch_pending(plan, OF_UPDATES, &done);
    if (scalings)
        of_launch_pending(plan, OF_SCALINGS, &done);
    of_count_steps(plan);
    of_queues_let_go(plan, &done);
    of_status status = of_plan_health(plan);
    if (wait ? !of_queues_drain(plan) : status == OF_OK && !of_queues_join(plan))
        status = OF_REFUSED;
    if (scalings && !wait) /* a user may synchronize the device: then the updates are done */
        of_queues_fence(plan);
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

/* Later uses of the parameters are ordered after this point of the caller's streams: a user
 * has to order them after step(), which comes later still. */
of_status of_plan_close(of_plan *plan) {
    if (plan->mode == OF_FORWARD)
        return OF_OK;
    of_status status = of_plan_flush(plan);
    pthread_mutex_lock(&plan->lock);
    if (status == OF_OK)
        of_queues_forget(plan);
    pthread_mutex_unlock(&plan->lock);
    return status;
}

of_status of_flush_all(void) {
    return of_any_pending() ? of_plans_each(of_plan_flush) : OF_OK;
}

/* Another thread may have left updates pending after the flush. No reference can be
 * released before the locks are free again. */
static void launch_late(of_plan *plan) {
    if (!OF_GUARD(fork))
        return;
    of_launch_pending(plan, OF_UPDATES, &plan->forked);
    of_launch_pending(plan, OF_SCALINGS, &plan->forked);
}

void of_fork_prepare(void) {
    if (OF_GUARD(fork))
        of_flush_all();
    of_plans_lock(launch_late);
    of_registry_lock();
}

static of_status release_late(of_plan *plan) {
    pthread_mutex_lock(&plan->lock);
    of_list forked = plan->forked;
    plan->forked = (of_list){0};
    pthread_mutex_unlock(&plan->lock);
    of_updates_release(plan, &forked);
    return OF_OK;
}

void of_fork_parent(void) {
    of_registry_unlock();
    of_plans_unlock();
    of_plans_each(release_late);
}

void of_fork_child(void) {
    of_plans_adopt();
    of_fork_parent();
}
