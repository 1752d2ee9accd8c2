/* SPDX-License-Identifier: BSD-3-Clause */
/* transaction.c: updates of many slots. All are collected before one is committed, so that a
 * failure changes nothing; then all are committed, and created in the order of the slots. */
#include "internal.h"

void of_name(of_named *named, size_t slot) {
    if (named->n < named->capacity)
        named->slots[named->n] = slot;
    named->n++;
}

void of_name_only(of_named *named, size_t slot) {
    named->n = 0;
    of_name(named, slot);
}

/* The record of a slot, with what its last update has left there; or, where there is none or it is
 * in use, one of the pool. */
static of_update *take_record(of_plan *plan, const of_slot *slot) {
    of_update *own = slot->own;
    return own && of_hold_alone(&own->holders) ? own : of_pool_take(plan);
}

static void keep_record(of_slot *slot, of_update *update) {
    if (slot->own)
        return;
    slot->own = update;
    of_retain(&update->holders);
}

/* Cleared, or as the host may find it again. */
static void prepare(of_update *u, bool is_own, unsigned used, bool in_backward) {
    const bool again =
        is_own && u->in.again && u->in.used == used && u->in.in_backward == in_backward;
    if (!again) {
        u->kind = &of_update_kind;
        u->in = (of_inputs){.used = used, .in_backward = in_backward};
    }
    of_update_clear(u);
}

/* Asks the host for one slot's inputs. Appends to `created` if there is something to update. */
static of_status collect_slot(of_plan *plan, size_t index, bool in_backward, of_list *created,
                              of_named *lacking) {
    of_slot *slot = &plan->slots[index];
    of_group *group = &plan->groups[slot->group];
    of_update *u = take_record(plan, slot);
    if (!u)
        return OF_NO_MEMORY;
    u->slot = index;
    prepare(u, u == slot->own, group->used, in_backward);
    const bool again = u->in.again;
    const of_found found = plan->host.collect(plan->host.ctx, slot->tensor, &u->in);
    if (found != OF_FOUND_INPUTS) {
        u->in.again = false;
        of_update_drop(u);
        if (found == OF_FOUND_NEEDS_STATE)
            of_name(lacking, index);
        return found == OF_FOUND_ERROR ? OF_INVALID : OF_OK;
    }
    keep_record(slot, u);
    if (!in_backward && u->in.device != OF_CPU)
        u->in.stream = u->in.ready; /* nothing runs beside step() */
    of_list_append(created, u);
    const of_status status = of_update_complete(plan, group, u, again && u->in.again);
    if (status != OF_OK)
        u->in.again = false; /* all of it has to be looked at anew */
    return status;
}

static bool is_chosen(const of_plan *plan, const of_chosen *of, size_t slot) {
    return of->slots || !plan->slots[slot].updated;
}

static size_t slot_at(const of_chosen *of, size_t i) {
    return of->slots ? of->slots[i] : i;
}

/* As many as fit the cache with all their records. */
enum { PREFETCHED = 32 };

/* Those from i on whose inputs are asked for next. */
static void prefetch_next(const of_plan *plan, const of_chosen *of, size_t i) {
    void *tensors[PREFETCHED];
    size_t n = 0;
    if (!plan->host.prefetch)
        return;
    for (size_t end = i + PREFETCHED; i < end && i < of->n; i++)
        if (is_chosen(plan, of, slot_at(of, i)))
            tensors[n++] = plan->slots[slot_at(of, i)].tensor;
    if (n > 1)
        plan->host.prefetch(plan->host.ctx, tensors, n);
}

of_status of_collect_all(of_plan *plan, const of_chosen *of, of_list *created, of_named *named) {
    of_status status = OF_OK;
    for (size_t i = 0; i < of->n && status == OF_OK; i++) {
        const size_t slot = slot_at(of, i);
        if (i % PREFETCHED == 0)
            prefetch_next(plan, of, i);
        if (!is_chosen(plan, of, slot))
            continue;
        status = collect_slot(plan, slot, of->in_backward, created, named);
        if (status != OF_OK)
            of_name_only(named, slot);
    }
    if (status == OF_OK && named->n)
        return of_fail(OF_NEEDS_STATE, "%zu parameters have a gradient but no optimizer state yet",
                       named->n);
    return status;
}

/* An update of another plan, or one that has to wait for its gradient, is launched: both need our
 * lock dropped. A scaling of the gradient stays pending: this update has its factor. */
static bool overtake(of_plan *plan, const void *key) {
    pthread_mutex_unlock(&plan->lock);
    const of_accessed accessed = of_launch_at(key, false);
    pthread_mutex_lock(&plan->lock);
    if (accessed == OF_IN_FLIGHT)
        of_registry_take(OF_UPDATES, key);
    if (accessed == OF_ACCESS_FAILED)
        of_plan_fail(plan);
    return accessed != OF_ACCESS_FAILED;
}

bool of_leave_pending(of_plan *plan, of_update *update, of_list *batch, of_list *done) {
    const void *key = NULL;
    of_entered entered;
    do
        entered = of_enter_pending(plan, update, batch, done, &key);
    while (entered == OF_IN_THE_WAY && overtake(plan, key));
    return entered == OF_ENTERED;
}

void of_add_to_batch(of_plan *plan, of_update *update, of_list *batch, of_list *done) {
    const void *key = NULL;
    while (of_enter_batch(plan, update, batch, done, &key) == OF_IN_THE_WAY)
        if (!overtake(plan, key)) {
            of_list_append(batch, update);
            of_launch(plan, batch, OF_AT_ONCE, done);
            return;
        }
}

/* An update that is not left pending needs its gradient now. The lock is let go meanwhile: nobody
 * may find the update, and the batch goes first, as no update may wait in it. False: the gradient
 * will never come. */
static bool fetch(of_plan *plan, of_update *update, of_list *batch, of_list *done) {
    bool arrived = true;
    while (arrived && of_is_missing(plan, update)) {
        of_registry_remove_one(update);
        of_launch(plan, batch, OF_AT_ONCE, done);
        arrived = of_await(plan, update->in.awaits);
    }
    if (!arrived) {
        of_list lost = {0};
        of_plan_fail(plan);
        of_list_append(&lost, update);
        of_settle(plan, &lost, done);
    }
    return arrived;
}

/* Updates that are not left pending run together, in one launch at the end. */
static void create_all(of_plan *plan, of_list *created, bool defer, of_list *exclusive,
                       of_list *done) {
    of_list batch = {0};
    of_update *run = created->first; /* where the next one begins */
    pthread_mutex_lock(&plan->lock);
    plan->counts.created += created->count;
    plan->counts.in_step += defer ? 0 : created->count;
    for (of_update *u = created->first, *next; u; u = next) {
        next = u->next;
        if (defer && u == run)
            run = of_enter_run(u);
        if (u->in.exclusive)
            of_list_append(exclusive, u);
        else if ((!defer || !of_leave_pending(plan, u, &batch, done)) &&
                 fetch(plan, u, &batch, done))
            of_add_to_batch(plan, u, &batch, done);
    }
    of_launch(plan, &batch, OF_AT_ONCE, done);
    *created = (of_list){0};
    pthread_mutex_unlock(&plan->lock);
}

void of_commit_one(of_plan *plan, of_update *update, bool defer, of_list *done) {
    of_list batch = {0};
    const bool may_wait = defer && !update->in.exclusive;
    plan->host.commit(plan->host.ctx, &update->in);
    pthread_mutex_lock(&plan->lock);
    if (!(may_wait && of_leave_pending(plan, update, &batch, done)) &&
        fetch(plan, update, &batch, done))
        of_add_to_batch(plan, update, &batch, done);
    of_launch(plan, &batch, OF_AT_ONCE, done);
    pthread_mutex_unlock(&plan->lock);
}

/* Parameters that overlap: each sees the result of the one before it. */
static void run_exclusive(of_plan *plan, const of_list *exclusive) {
    for (of_update *u = exclusive->first, *next; u; u = next) {
        next = u->next;
        of_list done = {0};
        of_commit_one(plan, u, false, &done);
        of_updates_release(plan, &done);
    }
}

void of_commit_all(of_plan *plan, of_list *created, bool defer, of_list *done) {
    of_list exclusive = {0};
    for (of_update *u = created->first; u; u = u->next)
        if (!u->in.exclusive)
            plan->host.commit(plan->host.ctx, &u->in);
    create_all(plan, created, defer, &exclusive, done);
    run_exclusive(plan, &exclusive);
}
