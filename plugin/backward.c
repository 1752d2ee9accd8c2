/* SPDX-License-Identifier: BSD-3-Clause */
/* backward.c: updates inside backward. Those of gradients that have waited for each other run
 * in one launch. A slot is updated once until the next step(). */
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
        return of_fail(OF_TWICE,
                       "a second gradient arrived before step(): backward fusion has already "
                       "updated this parameter.\nTo accumulate, fuse with "
                       "optfuse.Backward(accumulate=n), which counts n passes a step; or run "
                       "passes that only add, or whose gradients are thrown away, inside `with "
                       "optfuse.accumulate(optimizer):`.\nAny number of passes works with "
                       "optfuse.fuse(optimizer, mode=\"forward\")");
    set_updated(plan, slot);
    return OF_OK;
}

/* An update on a side stream is pending until its launch, so that other streams wait for it.
 * An update that must not be pending runs on the stream where its inputs are ready. */
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

/* With layout written. */
static of_status run_together(of_plan *plan, of_list *created, of_list *done) {
    const of_reason reason = created->count > 1 ? OF_AT_CLOSE : OF_AT_ONCE;
    of_list batch = {0};
    for (of_update *u = created->first; u; u = u->next)
        plan->host.commit(plan->host.ctx, &u->in);
    pthread_mutex_lock(&plan->lock);
    plan->counts.created += created->count;
    for (of_update *u = created->first, *next; u; u = next) {
        next = u->next;
        if (u->in.device == OF_CPU || !create_aside(plan, u, done))
            of_add_to_batch(plan, u, &batch, done);
    }
    *created = (of_list){0};
    of_launch(plan, &batch, reason, done);
    of_status status = of_plan_health(plan);
    pthread_mutex_unlock(&plan->lock);
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

/* An exclusive update has to be released before the next update is committed, and in backward
 * no update may be released with layout written: its gradient dies then, and with the gradient
 * whatever hangs on it. */
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
    of_status status = OF_OK;
    for (size_t i = 0; i < batch->n && status == OF_OK; i++)
        status = of_check_slot(plan, batch->slots[i]);
    return status;
}

/* *named: slots that lack state, the slot that failed, or slots that need calls of their own. */
static of_status update_together(of_plan *plan, const of_batch *batch, of_named *named) {
    of_list created = {0};
    of_list exclusive = {0};
    of_list done = {0};
    named->n = 0;
    pthread_rwlock_wrlock(&plan->layout);
    of_status status = check_slots(plan, batch);
    if (status == OF_OK)
        status = of_collect_all(plan, &(of_chosen){batch->slots, batch->n, true}, &created, named);
    if (status == OF_OK) {
        if (batch->n > 1)
            set_apart(&created, &exclusive, named);
        status = claim_all(plan, &created, named);
    }
    if (status == OF_OK) {
        status = run_together(plan, &created, &done);
        if (status != OF_OK)
            named->n = 0; /* of no slot of these, unless it is the only one */
    }
    pthread_rwlock_unlock(&plan->layout);
    of_updates_release(plan, &created);
    of_updates_release(plan, &exclusive);
    of_updates_release(plan, &done);
    return status;
}

/* No lock is held: the host may ask Python. */
static of_status make_states(of_plan *plan, const of_named *lacking) {
    for (size_t i = 0; i < lacking->n; i++)
        if (!plan->host.backward->make_state(plan->host.ctx, lacking->slots[i]))
            return OF_REFUSED;
    return OF_OK;
}

of_status of_update_batch(of_plan *plan, const of_batch *batch, size_t *at) {
    of_named named = {batch->slots + batch->capacity, batch->n, 0};
    of_status status = update_together(plan, batch, &named);
    *at = OF_NO_SLOT;
    if (status == OF_NEEDS_STATE) {
        if (make_states(plan, &named) != OF_OK)
            return OF_REFUSED;
        status = update_together(plan, batch, &named);
    }
    if (status != OF_OK)
        *at = named.n ? named.slots[0] : batch->n == 1 ? batch->slots[0] : OF_NO_SLOT;
    for (size_t i = 0; status == OF_OK && i < named.n; i++)
        status = of_update_slot(plan, named.slots[i], at);
    return status;
}

of_status of_update_slot(of_plan *plan, size_t slot, size_t *at) {
    size_t slots[2] = {slot};
    return of_update_batch(plan, &(of_batch){slots, 1, 1}, at);
}

/* The updates that backward made belong to this step(). */
void of_confirm(of_plan *plan) {
    for (size_t i = 0; plan->n_updated && i < plan->n_slots; i++)
        plan->slots[i].updated = false;
    plan->n_updated = plan->n_passes = 0;
}

bool of_confirm_slot(of_plan *plan, size_t slot) {
    const bool updated = slot < plan->n_slots && plan->slots[slot].updated;
    if (updated)
        unclaim(plan, slot);
    return updated;
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
