/* SPDX-License-Identifier: BSD-3-Clause */
/* step.c: updates of many slots together: optimizer.step() of both schedules, and
 * gradients that backward fusion has let wait for each other. */
#include "internal.h"

/* Which slots. */
typedef struct chosen {
    const size_t *slots; /* NULL: all that backward has not updated */
    size_t n;
} chosen;

/* Slots that lack state, the one that failed, or those set apart. */
typedef struct needs {
    size_t *slots;
    size_t capacity;
    size_t n;
} needs;

static void add_need(needs *lacking, size_t slot) {
    if (lacking->n < lacking->capacity)
        lacking->slots[lacking->n] = slot;
    lacking->n++;
}

static void failed_at(needs *at, size_t slot) {
    at->n = 0;
    add_need(at, slot);
}

/* Asks the host for one slot's inputs. Appends *update to the list and takes
 * it from the caller if there is something to update. */
static of_status collect_slot(of_plan *plan, of_update **update, bool in_backward, of_list *created,
                              needs *lacking) {
    of_update *u = *update;
    of_inputs_clear(u);
    u->in.in_backward = in_backward;
    switch (plan->host.collect(plan->host.ctx, plan->slots[u->slot].tensor, &u->in)) {
    case OF_FOUND_NOTHING:
        return OF_OK;
    case OF_FOUND_NEEDS_STATE:
        add_need(lacking, u->slot);
        return OF_OK;
    case OF_FOUND_ERROR:
        return OF_INVALID;
    case OF_FOUND_INPUTS:
        break;
    }
    u->bytes = 0;
    u->in.stream = u->in.ready; /* nothing runs beside this */
    of_list_append(created, u);
    *update = NULL;
    return of_update_complete(plan, u);
}

static bool is_chosen(const of_plan *plan, const chosen *of, size_t slot) {
    return of->slots || !plan->slots[slot].updated;
}

static size_t slot_at(const chosen *of, size_t i) {
    return of->slots ? of->slots[i] : i;
}

/* As many as fit the cache with all their records. */
enum { EXPECTED = 32 };

/* Those from i on whose inputs are asked for next. */
static void expect_next(const of_plan *plan, const chosen *of, size_t i) {
    void *tensors[EXPECTED];
    size_t n = 0;
    if (!plan->host.expect)
        return;
    for (size_t end = i + EXPECTED; i < end && i < of->n; i++)
        if (is_chosen(plan, of, slot_at(of, i)))
            tensors[n++] = plan->slots[slot_at(of, i)].tensor;
    if (n > 1)
        plan->host.expect(plan->host.ctx, tensors, n);
}

/* Everything that can fail happens here, before anything has changed. */
static of_status collect_all(of_plan *plan, const chosen *of, of_list *created, needs *lacking) {
    of_status status = OF_OK;
    of_update *update = NULL;
    for (size_t i = 0; i < of->n && status == OF_OK; i++) {
        const size_t slot = slot_at(of, i);
        if (i % EXPECTED == 0)
            expect_next(plan, of, i);
        if (!is_chosen(plan, of, slot))
            continue;
        if (!update && !(update = of_pool_take(plan))) {
            failed_at(lacking, slot);
            return OF_NO_MEMORY;
        }
        update->slot = slot;
        status = collect_slot(plan, &update, of->slots != NULL, created, lacking);
        if (status != OF_OK)
            failed_at(lacking, slot);
    }
    if (update)
        of_pool_give(plan, update);
    if (status == OF_OK && lacking->n)
        return of_fail(OF_NEEDS_STATE, "%zu parameters have a gradient but no optimizer state yet",
                       lacking->n);
    return status;
}

static void commit_all(of_plan *plan, const of_list *created) {
    for (of_update *u = created->first; u; u = u->next)
        if (!u->in.alone)
            plan->host.commit(plan->host.ctx, &u->in);
}

/* What is not left pending is run together, in one launch at the end. */
static void create_all(of_plan *plan, of_list *created, of_reason reason, of_list *alone,
                       of_list *done) {
    of_list batch = {0};
    pthread_mutex_lock(&plan->lock);
    plan->counts.created += created->count;
    for (of_update *u = created->first, *next; u; u = next) {
        next = u->next;
        if (u->in.alone)
            of_list_append(alone, u);
        else if (plan->mode == OF_BACKWARD || !of_create_pending(plan, u, &batch, done))
            of_create_now(plan, u, &batch, done);
    }
    of_launch(plan, &batch, reason, done);
    *created = (of_list){0};
    pthread_mutex_unlock(&plan->lock);
}

/* Parameters that overlap: each sees the result of the one before it. */
static void run_alone(of_plan *plan, const of_list *alone) {
    for (of_update *u = alone->first, *next; u; u = next) {
        next = u->next;
        of_list batch = {0};
        of_list done = {0};
        plan->host.commit(plan->host.ctx, &u->in);
        pthread_mutex_lock(&plan->lock);
        of_create_now(plan, u, &batch, &done);
        of_launch(plan, &batch, OF_AT_ONCE, &done);
        pthread_mutex_unlock(&plan->lock);
        of_updates_release(plan, &done);
    }
}

static void run_all(of_plan *plan, of_list *created, of_reason reason, of_list *done) {
    of_list alone = {0};
    commit_all(plan, created);
    create_all(plan, created, reason, &alone, done);
    run_alone(plan, &alone);
}

/* Backward mode: the updates made in backward belong to this step. */
static of_status confirm(of_plan *plan) {
    pthread_mutex_lock(&plan->lock);
    for (size_t i = 0; plan->n_updated && i < plan->n_slots; i++)
        of_unclaim(plan, i);
    of_status status = of_plan_health(plan);
    pthread_mutex_unlock(&plan->lock);
    return status;
}

/* What is still pending goes first, and its holds with it: the references in
 * them would make this step's memory look shared. */
static of_status begin(of_plan *plan) {
    of_status status = of_plan_launch(plan);
    pthread_mutex_lock(&plan->lock);
    of_lanes_land(plan, false); /* what is created now is marked anew */
    pthread_mutex_unlock(&plan->lock);
    return status;
}

of_status of_plan_step(of_plan *plan, size_t *slots, size_t capacity, size_t *n_needs) {
    of_list created = {0};
    of_list done = {0};
    needs lacking = {slots, slots ? capacity : 0, 0};
    if (n_needs)
        *n_needs = 0;
    of_status status = OF_GUARD(rearm) ? begin(plan) : OF_OK;
    if (status != OF_OK)
        return status;
    pthread_rwlock_wrlock(&plan->layout);
    status = collect_all(plan, &(chosen){NULL, plan->n_slots}, &created, &lacking);
    if (status == OF_OK) {
        run_all(plan, &created, OF_AT_ONCE, &done);
        status = confirm(plan);
    }
    pthread_rwlock_unlock(&plan->layout);
    of_updates_release(plan, &created);
    of_updates_release(plan, &done);
    if (n_needs && status == OF_NEEDS_STATE)
        *n_needs = lacking.n;
    return status;
}

/* All or none. */
static of_status claim_all(of_plan *plan, const of_list *created, needs *failed) {
    of_status status = OF_OK;
    pthread_mutex_lock(&plan->lock);
    const of_update *u = created->first;
    while (u && (status = of_claim(plan, u->slot)) == OF_OK)
        u = u->next;
    for (const of_update *claimed = created->first; u && claimed != u; claimed = claimed->next)
        of_unclaim(plan, claimed->slot);
    pthread_mutex_unlock(&plan->lock);
    if (u)
        failed_at(failed, u->slot);
    return status;
}

static of_status check_slots(const of_plan *plan, const size_t *slots, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (slots[i] >= plan->n_slots)
            return of_fail(OF_INVALID, "there is no slot %zu: the plan has %zu", slots[i],
                           plan->n_slots);
    return OF_OK;
}

/* What is alone has to be released before the next one is committed, and in backward
 * nothing may be released with layout written: gradients die then, and with them whatever
 * hangs on them. */
static void set_apart(of_list *created, of_list *alone, needs *apart) {
    for (of_update *u = created->first, *next; u; u = next) {
        next = u->next;
        if (!u->in.alone)
            continue;
        of_list_remove(created, u);
        of_list_append(alone, u);
        add_need(apart, u->slot);
    }
}

of_status of_plan_gradients(of_plan *plan, const size_t *slots, size_t n, size_t *which,
                            size_t *n_which) {
    of_list created = {0};
    of_list alone = {0};
    of_list done = {0};
    needs concerned = {which, n, 0};
    *n_which = 0;
    if (plan->mode != OF_BACKWARD)
        return of_fail(OF_INVALID, "of_plan_gradients() is for backward mode");
    pthread_rwlock_wrlock(&plan->layout);
    of_status status = check_slots(plan, slots, n);
    if (status == OF_OK)
        status = collect_all(plan, &(chosen){slots, n}, &created, &concerned);
    if (status == OF_OK) {
        set_apart(&created, &alone, &concerned);
        status = claim_all(plan, &created, &concerned);
    }
    if (status == OF_OK) {
        run_all(plan, &created, OF_AT_CLOSE, &done);
        pthread_mutex_lock(&plan->lock);
        status = of_plan_health(plan);
        pthread_mutex_unlock(&plan->lock);
        if (status != OF_OK)
            concerned.n = 0; /* of no slot of these */
    }
    pthread_rwlock_unlock(&plan->layout);
    of_updates_release(plan, &created);
    of_updates_release(plan, &alone);
    of_updates_release(plan, &done);
    *n_which = concerned.n;
    return status;
}
