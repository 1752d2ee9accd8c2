/* SPDX-License-Identifier: BSD-3-Clause */
/* forward.c: optimizer.step(), of all slots or of one. In forward fusion it creates every update and
 * leaves it pending, for its first use (access.c). In backward fusion it updates what no pass has. */
#include "internal.h"

/* Pending updates are launched first: their references would make this step's memory look
 * shared. */
static of_status begin(of_plan *plan) {
    of_status status = OF_GUARD(rearm) ? of_plan_launch(plan) : OF_OK;
    pthread_mutex_lock(&plan->lock);
    of_passes_forget(plan);
    if (OF_GUARD(rearm))
        of_queues_reap(plan); /* what is created now is marked anew */
    pthread_mutex_unlock(&plan->lock);
    return status;
}

/* With layout written. What is to be released ends up in *done. */
static of_status update_all(of_plan *plan, of_named *lacking, of_list *done) {
    of_list created = {0};
    const bool none_is_left = plan->n_updated == plan->n_slots; /* by backward */
    const of_chosen left = {NULL, none_is_left ? 0 : plan->n_slots, false};
    of_status status = of_collect_all(plan, &left, &created, lacking);
    if (status != OF_OK) {
        *done = created;
        return status;
    }
    of_commit_all(plan, &created, plan->mode != OF_BACKWARD, done);
    pthread_mutex_lock(&plan->lock);
    if (plan->mode == OF_BACKWARD)
        of_confirm(plan);
    of_count_steps(plan);
    status = of_plan_health(plan);
    pthread_mutex_unlock(&plan->lock);
    return status;
}

of_status of_plan_step(of_plan *plan, size_t *needs, size_t capacity, size_t *n_needs) {
    of_list done = {0};
    of_named lacking = {needs, needs ? capacity : 0, 0};
    if (n_needs)
        *n_needs = 0;
    of_status status = begin(plan);
    if (status != OF_OK)
        return status;
    pthread_rwlock_wrlock(&plan->layout);
    status = update_all(plan, &lacking, &done);
    pthread_rwlock_unlock(&plan->layout);
    of_updates_release(plan, &done);
    if (n_needs && status == OF_NEEDS_STATE)
        *n_needs = lacking.n;
    return status;
}

/* With layout written. */
static of_status step_slot(of_plan *plan, size_t slot, bool at_once, of_list *done) {
    of_list created = {0};
    size_t failed[1];
    of_named named = {failed, 1, 0};
    of_status status = of_check_slot(plan, slot);
    if (status == OF_OK)
        status = of_collect_all(plan, &(of_chosen){&slot, 1, false}, &created, &named);
    of_update *update = created.first;
    if (status != OF_OK || !update) {
        *done = created;
        return status;
    }
    const of_device device = update->in.device;
    const bool is_small = of_waits_for_others(plan, device, update->bytes, update->in.numel);
    of_commit_one(plan, update, !at_once && is_small, done);
    pthread_mutex_lock(&plan->lock);
    plan->counts.created++;
    if (!at_once && plan->pending[OF_UPDATES].bytes >= plan->bucket_bytes[device])
        of_launch(plan, &plan->pending[OF_UPDATES], OF_AT_CLOSE, done);
    status = of_plan_health(plan);
    pthread_mutex_unlock(&plan->lock);
    return status;
}

of_status of_plan_step_slot(of_plan *plan, size_t slot, bool at_once) {
    of_list done = {0};
    pthread_mutex_lock(&plan->lock);
    const bool confirmed = of_confirm_slot(plan, slot);
    pthread_mutex_unlock(&plan->lock);
    if (confirmed)
        return OF_OK;
    pthread_rwlock_wrlock(&plan->layout);
    const of_status status = step_slot(plan, slot, at_once, &done);
    pthread_rwlock_unlock(&plan->layout);
    of_updates_release(plan, &done);
    return status;
}
