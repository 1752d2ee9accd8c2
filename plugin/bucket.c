/* SPDX-License-Identifier: BSD-3-Clause */
/* bucket.c: backward fusion. A gradient is complete; its update is created and
 * joins the open bucket, which is the plan's list of pending updates. */
#include "internal.h"

static void note_updated(of_plan *plan, of_slot *slot) {
    plan->n_updated += !slot->updated;
    slot->updated = true;
}

of_status of_claim(of_plan *plan, size_t slot) {
    if (plan->slots[slot].updated && OF_GUARD(twice))
        return of_fail(OF_TWICE, "a second gradient arrived before step(): backward fusion has "
                                 "already updated this parameter; call step() after each "
                                 "backward, run passes that only add to the gradients, or whose "
                                 "gradients for this optimizer are thrown away, inside `with "
                                 "optfuse.accumulate(optimizer):`, or use mode=\"forward\"");
    note_updated(plan, &plan->slots[slot]);
    return OF_OK;
}

void of_unclaim(of_plan *plan, size_t slot) {
    plan->n_updated -= plan->slots[slot].updated;
    plan->slots[slot].updated = false;
}

/* Lock held. */
static of_status claim(of_plan *plan, of_update *update) {
    of_status status = of_update_complete(plan, update);
    if (status == OF_OK)
        status = of_claim(plan, update->slot);
    plan->counts.created += status == OF_OK;
    return status;
}

/* On a side stream: pending at least until its launch, so that others wait for
 * it. What must not be pending goes where it is ready. */
static bool create_aside(of_plan *plan, of_update *update, of_list *done) {
    of_list batch = {0};
    const size_t enough = plan->bucket_bytes[update->in.device];
    if (update->in.device == OF_CPU || of_stream_equal(&update->in.stream, &update->in.ready))
        return false;
    if (update->in.alone || !of_create_pending(plan, update, &batch, done)) {
        update->in.stream = update->in.ready;
        return false;
    }
    if (update->bytes >= enough)
        of_launch_one(plan, update, OF_AT_ONCE, done);
    else if (plan->pending.bytes >= enough)
        of_launch(plan, &plan->pending, OF_AT_CLOSE, done);
    return true;
}

/* The update that fills the bucket is launched with it and never deferred.
 * One that would fill a bucket alone doesn't wait for the open one. */
static void create(of_plan *plan, of_update *update, of_list *done) {
    of_list batch = {0};
    const size_t enough = plan->bucket_bytes[update->in.device];
    if (create_aside(plan, update, done))
        return;
    bool alone = update->in.alone || update->bytes >= enough || plan->stopped ||
                 plan->slots[update->slot].eager;
    bool fills = !alone && plan->pending.bytes + update->bytes >= enough;
    if (!alone && !fills && of_create_pending(plan, update, &batch, done))
        return;
    of_create_now(plan, update, &batch, done);
    if (!fills || !batch.first) {
        of_launch(plan, &batch, OF_AT_ONCE, done);
        return;
    }
    of_list_append(&plan->pending, update);
    of_launch(plan, &plan->pending, OF_AT_CLOSE, done);
}

static of_status status_of(of_found found) {
    switch (found) {
    case OF_FOUND_NOTHING:
        return OF_OK;
    case OF_FOUND_NEEDS_STATE:
        return of_fail(OF_NEEDS_STATE, "the parameter has a gradient but no optimizer state yet");
    default:
        return OF_INVALID;
    }
}

static of_status update_slot(of_plan *plan, of_update *update, of_list *done) {
    of_slot *slot = &plan->slots[update->slot];
    of_inputs_clear(update);
    update->in.in_backward = true;
    of_found found = plan->host.collect(plan->host.ctx, slot->tensor, &update->in);
    if (found != OF_FOUND_INPUTS) {
        of_pool_give(plan, update);
        return status_of(found);
    }
    pthread_mutex_lock(&plan->lock);
    of_status status = claim(plan, update);
    pthread_mutex_unlock(&plan->lock);
    if (status != OF_OK) {
        of_list_append(done, update);
        return status;
    }
    plan->host.commit(plan->host.ctx, &update->in);
    pthread_mutex_lock(&plan->lock);
    create(plan, update, done);
    status = of_plan_health(plan);
    pthread_mutex_unlock(&plan->lock);
    return status;
}

of_status of_take_for_slot(of_plan *plan, size_t slot, of_update **update) {
    if (slot >= plan->n_slots)
        return of_fail(OF_INVALID, "there is no slot %zu: the plan has %zu", slot, plan->n_slots);
    pthread_mutex_lock(&plan->lock);
    *update = of_pool_take(plan);
    pthread_mutex_unlock(&plan->lock);
    if (!*update)
        return OF_NO_MEMORY;
    (*update)->slot = slot;
    return OF_OK;
}

of_status of_plan_gradient(of_plan *plan, size_t slot) {
    of_list done = {0};
    of_update *update = NULL;
    if (plan->mode != OF_BACKWARD)
        return of_fail(OF_INVALID, "of_plan_gradient() is for backward mode");
    pthread_rwlock_rdlock(&plan->layout);
    of_status status = of_take_for_slot(plan, slot, &update);
    if (update)
        status = update_slot(plan, update, &done);
    pthread_rwlock_unlock(&plan->layout);
    of_updates_release(plan, &done);
    return status;
}

size_t of_plan_unconfirmed(of_plan *plan) {
    pthread_mutex_lock(&plan->lock);
    size_t unconfirmed = plan->n_updated;
    pthread_mutex_unlock(&plan->lock);
    return unconfirmed;
}

bool of_plan_is_updated(of_plan *plan, size_t slot) {
    pthread_mutex_lock(&plan->lock);
    bool updated = slot < plan->n_slots && plan->slots[slot].updated;
    pthread_mutex_unlock(&plan->lock);
    return updated;
}

void of_plan_set_updated(of_plan *plan, size_t slot) {
    pthread_mutex_lock(&plan->lock);
    if (slot < plan->n_slots)
        note_updated(plan, &plan->slots[slot]);
    pthread_mutex_unlock(&plan->lock);
}

/* Whoever uses the parameters later is ordered after this point of the caller's
 * streams, as it would have to be after a step() that comes later still. */
of_status of_plan_close(of_plan *plan) {
    if (plan->mode != OF_BACKWARD)
        return OF_OK;
    of_status status = of_plan_flush(plan);
    pthread_mutex_lock(&plan->lock);
    if (status == OF_OK)
        of_lanes_forget(plan);
    pthread_mutex_unlock(&plan->lock);
    return status;
}
