/* SPDX-License-Identifier: BSD-3-Clause */
/* create.c: where a committed update enters the registry, and the decision
 * whether it may be left pending. */
#include "internal.h"

/* Another update has the key and is launched, if it was pending. If it is in
 * flight the new one is ordered after it and takes the key. Lock held. */
static bool overtake_own(of_plan *plan, of_update *own, const of_update *update, const void *key,
                         of_list *done) {
    if (own->pending)
        of_launch_one(plan, own, OF_AT_CLOSE, done);
    if (!own->flying)
        return true;
    of_registry_take(key);
    return update->in.device == OF_CPU ||
           of_stream_order(plan, &own->in.stream, &update->in.stream);
}

/* As above, by an update of another plan, whose lock needs ours dropped. A scaling of
 * the gradient stays pending: this update has its factor. */
static bool overtake_other(of_plan *plan, const void *key) {
    pthread_mutex_unlock(&plan->lock);
    const of_touched touched = of_launch_at(key, false);
    pthread_mutex_lock(&plan->lock);
    if (touched == OF_IN_FLIGHT)
        of_registry_take(key);
    return touched != OF_TOUCH_FAILED;
}

/* Enters the first n keys after launching whatever is in the way. */
static bool enter(of_plan *plan, of_update *update, size_t n, of_list *batch, of_list *done) {
    for (;;) {
        const void *key = NULL;
        of_update *own = NULL;
        of_added added = of_registry_add(update, n, &key, &own);
        if (added == OF_ADDED)
            return true;
        /* The batch goes first: it may be in the way, and no update may wait
         * in it while the lock is dropped. */
        of_launch(plan, batch, OF_AT_ONCE, done);
        if (added == OF_ADD_NO_MEMORY)
            return false;
        if (!(own ? overtake_own(plan, own, update, key, done) : overtake_other(plan, key))) {
            of_plan_fail(plan);
            return false;
        }
    }
}

/* What a graph captures must be in it when step() returns. */
static bool is_captured_step(const of_plan *plan, const of_update *update) {
    return plan->mode == OF_FORWARD && update->in.stream.capture != 0 && OF_GUARD(capture);
}

/* The keys are entered before defer(): a thread that meets the host's mark
 * must find the key. */
bool of_create_pending(of_plan *plan, of_update *update, of_list *batch, of_list *done) {
    if (plan->stopped || plan->slots[update->slot].eager || update->in.n_keys == 0 ||
        is_captured_step(plan, update))
        return false;
    if (!enter(plan, update, update->in.n_keys, batch, done))
        return false;
    if (!plan->host.defer(plan->host.ctx, update->in.hold)) {
        of_registry_remove_one(update);
        return false;
    }
    update->pending = true;
    update->deferred = true;
    of_list_append(&plan->pending, update);
    return true;
}

/* Only the parameter's key: many gradients may share one buffer, and they are
 * only read. */
void of_create_now(of_plan *plan, of_update *update, of_list *batch, of_list *done) {
    bool entered = enter(plan, update, update->in.n_keys ? 1 : 0, batch, done);
    of_list_append(batch, update);
    if (!entered)
        of_launch(plan, batch, OF_AT_ONCE, done);
}
