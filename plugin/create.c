/* SPDX-License-Identifier: BSD-3-Clause */
/* create.c: where a committed update enters the registry, and the decision
 * whether it may be left pending. */
#include "internal.h"

/* Enters the first n keys after launching whatever is in the way: of this
 * plan directly, of another plan without holding our lock. */
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
        if (own && own->pending)
            of_launch_one(plan, own, OF_AT_CLOSE, done);
        if (own)
            continue;
        pthread_mutex_unlock(&plan->lock);
        of_touch(key, false);
        pthread_mutex_lock(&plan->lock);
    }
}

static void leave(of_update *update) {
    of_list one = {0};
    of_list_append(&one, update);
    of_registry_remove(&one);
}

/* The keys are entered before defer(): a thread that meets the host's mark
 * must find the key. */
bool of_create_pending(of_plan *plan, of_update *update, of_list *batch, of_list *done) {
    if (plan->stopped || plan->slots[update->slot].eager || update->in.n_keys == 0)
        return false;
    if (!enter(plan, update, update->in.n_keys, batch, done))
        return false;
    if (!plan->host.defer(plan->host.ctx, update->in.hold)) {
        leave(update);
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
