/* SPDX-License-Identifier: BSD-3-Clause */
/* backward.c: updates inside backward. One runs at once, or joins the open bucket of its
 * device, which is the plan's list of pending updates; those that have waited for each other
 * on the CPU run in one launch. A slot is updated once until the next step(). */
#include "internal.h"

/* With plan->lock held. */
static void set_updated(of_plan *plan, size_t slot) {
    plan->n_updated += !plan->slots[slot].updated;
    plan->slots[slot].updated = true;
}

static void unclaim(of_plan *plan, size_t slot) {
    plan->n_updated -= plan->slots[slot].updated;
    plan->slots[slot].updated = false;
}

static of_status claim(of_plan *plan, size_t slot) {
    if (plan->slots[slot].updated && OF_GUARD(twice))
        return of_fail(OF_TWICE, "a second gradient arrived before step(): backward fusion has "
                                 "already updated this parameter; call step() after each "
                                 "backward, run passes that only add to the gradients, or whose "
                                 "gradients for this optimizer are thrown away, inside `with "
                                 "optfuse.accumulate(optimizer):`, or use mode=\"forward\"");
    set_updated(plan, slot);
    return OF_OK;
}

static of_status complete_and_claim(of_plan *plan, of_update *update) {
    of_status status = of_update_complete(plan, update);
    if (status == OF_OK)
        status = claim(plan, update->slot);
    plan->counts.created += status == OF_OK;
    return status;
}

/* On a side stream: pending at least until its launch, so that others wait for
 * it. What must not be pending goes where it is ready. */
static bool create_aside(of_plan *plan, of_update *update, of_list *done) {
    of_list batch = {0};
    const size_t enough = plan->bucket_bytes[update->in.device];
    if (of_stream_equal(&update->in.stream, &update->in.ready))
        return false;
    if (update->in.exclusive || !of_leave_pending(plan, update, &batch, done)) {
        update->in.stream = update->in.ready;
        return false;
    }
    if (update->bytes >= enough)
        of_launch_one(plan, update, OF_AT_ONCE, done);
    else if (plan->pending[OF_UPDATES].bytes >= enough)
        of_launch(plan, &plan->pending[OF_UPDATES], OF_AT_CLOSE, done);
    return true;
}

/* The update that fills the bucket is launched with it and never deferred.
 * One that would fill a bucket by itself, or is on the CPU, doesn't wait for the open one. */
static void create(of_plan *plan, of_update *update, of_list *done) {
    of_list batch = {0};
    of_list *open = &plan->pending[OF_UPDATES];
    const size_t enough = plan->bucket_bytes[update->in.device];
    const bool on_cpu = update->in.device == OF_CPU;
    if (!on_cpu && create_aside(plan, update, done))
        return;
    const bool waits = !on_cpu && !update->in.exclusive && update->bytes < enough &&
                       !plan->stopped && !plan->slots[update->slot].eager;
    const bool fills = waits && open->bytes + update->bytes >= enough;
    if (waits && !fills && of_leave_pending(plan, update, &batch, done))
        return;
    of_add_to_batch(plan, update, &batch, done);
    if (!fills || !batch.first) {
        of_launch(plan, &batch, OF_AT_ONCE, done);
        return;
    }
    of_list_append(open, update);
    of_launch(plan, open, OF_AT_CLOSE, done);
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

static of_status update_with(of_plan *plan, of_update *update, of_list *done) {
    of_slot *slot = &plan->slots[update->slot];
    of_inputs_clear(update);
    update->kind = &of_update_kind;
    update->in.in_backward = true;
    of_found found = plan->host.collect(plan->host.ctx, slot->tensor, &update->in);
    if (found != OF_FOUND_INPUTS) {
        of_pool_give(plan, update);
        return status_of(found);
    }
    pthread_mutex_lock(&plan->lock);
    of_status status = complete_and_claim(plan, update);
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

static of_status update_one(of_plan *plan, size_t slot) {
    of_list done = {0};
    of_update *update = NULL;
    pthread_rwlock_rdlock(&plan->layout);
    of_status status = of_pool_take_for(plan, slot, &update);
    if (update)
        status = update_with(plan, update, &done);
    pthread_rwlock_unlock(&plan->layout);
    of_updates_release(plan, &done);
    return status;
}

/* No lock is held: the host may ask Python. */
static of_status make_state(of_plan *plan, size_t slot) {
    return plan->host.backward->make_state(plan->host.ctx, slot) ? OF_OK : OF_REFUSED;
}

of_status of_update_slot(of_plan *plan, size_t slot, size_t *at) {
    *at = slot;
    of_status status = update_one(plan, slot);
    if (status != OF_NEEDS_STATE)
        return status;
    status = make_state(plan, slot);
    if (status == OF_OK)
        return update_one(plan, slot);
    *at = OF_NO_SLOT;
    return status;
}

/* All or none. */
static of_status claim_all(of_plan *plan, const of_list *created, of_named *failed) {
    of_status status = OF_OK;
    pthread_mutex_lock(&plan->lock);
    const of_update *u = created->first;
    while (u && (status = claim(plan, u->slot)) == OF_OK)
        u = u->next;
    for (const of_update *claimed = created->first; u && claimed != u; claimed = claimed->next)
        unclaim(plan, claimed->slot);
    pthread_mutex_unlock(&plan->lock);
    if (u)
        of_name_only(failed, u->slot);
    return status;
}

/* What is exclusive has to be released before the next one is committed, and in backward
 * nothing may be released with layout written: gradients die then, and with them whatever
 * hangs on them. */
static void set_apart(of_list *created, of_list *exclusive, of_named *apart) {
    for (of_update *u = created->first, *next; u; u = next) {
        next = u->next;
        if (!u->in.exclusive)
            continue;
        of_list_remove(created, u);
        of_list_append(exclusive, u);
        of_name(apart, u->slot);
    }
}

static of_status check_slots(const of_plan *plan, const of_batch *batch) {
    for (size_t i = 0; i < batch->n; i++)
        if (batch->slots[i] >= plan->n_slots)
            return of_fail(OF_INVALID, "there is no slot %zu: the plan has %zu", batch->slots[i],
                           plan->n_slots);
    return OF_OK;
}

/* With layout written. */
static of_status run_together(of_plan *plan, of_list *created, of_list *done) {
    const of_reason reason = created->count > 1 ? OF_AT_CLOSE : OF_AT_ONCE;
    of_commit_all(plan, created, false, reason, done);
    pthread_mutex_lock(&plan->lock);
    of_status status = of_plan_health(plan);
    pthread_mutex_unlock(&plan->lock);
    return status;
}

/* named: those that lack state, the one that failed, or those that are left to calls of
 * their own. */
static of_status update_together(of_plan *plan, const of_batch *batch, of_named *named) {
    of_list created = {0};
    of_list exclusive = {0};
    of_list done = {0};
    named->n = 0;
    pthread_rwlock_wrlock(&plan->layout);
    of_status status = check_slots(plan, batch);
    if (status == OF_OK)
        status = of_collect_all(plan, &(of_chosen){batch->slots, batch->n}, &created, named);
    if (status == OF_OK) {
        set_apart(&created, &exclusive, named);
        status = claim_all(plan, &created, named);
    }
    if (status == OF_OK) {
        status = run_together(plan, &created, &done);
        if (status != OF_OK)
            named->n = 0; /* of no slot of these */
    }
    pthread_rwlock_unlock(&plan->layout);
    of_updates_release(plan, &created);
    of_updates_release(plan, &exclusive);
    of_updates_release(plan, &done);
    return status;
}

of_status of_update_batch(of_plan *plan, const of_batch *batch, size_t *at) {
    if (batch->n == 1)
        return of_update_slot(plan, batch->slots[0], at);
    of_named named = {batch->slots + batch->capacity, batch->n, 0};
    of_status status = update_together(plan, batch, &named);
    *at = OF_NO_SLOT;
    if (status == OF_NEEDS_STATE) {
        for (size_t i = 0; i < named.n; i++)
            if (make_state(plan, named.slots[i]) != OF_OK)
                return OF_REFUSED;
        status = update_together(plan, batch, &named);
    }
    if (status != OF_OK && named.n)
        *at = named.slots[0];
    for (size_t i = 0; status == OF_OK && i < named.n; i++)
        status = of_update_slot(plan, named.slots[i], at);
    return status;
}

/* The updates made in backward belong to this step. */
static void confirm(of_plan *plan) {
    pthread_mutex_lock(&plan->lock);
    for (size_t i = 0; plan->n_updated && i < plan->n_slots; i++)
        unclaim(plan, i);
    plan->n_passes = 0;
    pthread_mutex_unlock(&plan->lock);
}

of_status of_backward_step(of_plan *plan, of_named *lacking, of_list *done) {
    of_list created = {0};
    of_status status =
        of_collect_all(plan, &(of_chosen){NULL, plan->n_slots}, &created, lacking);
    if (status != OF_OK) {
        *done = created;
        return status;
    }
    of_commit_all(plan, &created, false, OF_AT_ONCE, done);
    confirm(plan);
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
        set_updated(plan, slot);
    pthread_mutex_unlock(&plan->lock);
}
