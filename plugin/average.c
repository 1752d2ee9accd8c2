/* SPDX-License-Identifier: BSD-3-Clause */
/* average.c: averages of parameters that are written behind the updates, chunk by chunk. */
#include "floating.h"
#include "internal.h"

static bool is_by_kernel(const of_update *update) {
    return update->in.device == OF_CPU && !of_is_by_host(update);
}

static bool fits(const of_plan *plan, const of_update *update, const of_average *average) {
    const of_inputs *in = &update->in;
    return in->keys[0] == average->param_key && in->numel == average->numel &&
           in->dtype == average->dtype && plan->programs[in->dtype] &&
           update->floating == of_floating_now();
}

bool of_average_behind(const of_average *average) {
    of_update *update = of_registry_find(OF_UPDATES, average->param_key);
    if (!update)
        return false;
    of_plan *plan = update->plan;
    if (plan->mode == OF_BACKWARD) { /* nothing waits, and the host's update may ask, with the lock */
        of_plan_unref(plan);
        return false;
    }
    pthread_mutex_lock(&plan->lock);
    const bool taken = update->pending && is_by_kernel(update) && !update->average.program &&
                       plan->host.defer_average && fits(plan, update, average) &&
                       of_registry_extend(update, average->key);
    if (taken) {
        update->average = *average;
        plan->host.defer_average(plan->host.ctx, update->in.references, average->host);
        plan->counts.averages++;
    }
    pthread_mutex_unlock(&plan->lock);
    of_plan_unref(plan);
    return taken;
}
