/* SPDX-License-Identifier: BSD-3-Clause */
/* pending.c: where a committed update enters the registry, and the decision
 * whether it may be left pending. */
#include "internal.h"

/* Another update has the key and is launched, if it was pending. If it is in
 * flight the new one is ordered after it and takes the key. Lock held. */
static bool overtake_own(of_plan *plan, of_update *own, const of_update *update, const void *key,
                         of_list *done) {
    if (own->pending)
        of_launch_one(plan, own, OF_AT_CLOSE, done);
    if (!own->in_flight)
        return true;
    of_registry_take(OF_UPDATES, key);
    return update->in.device == OF_CPU ||
           of_stream_order(plan, &own->in.stream, &update->in.stream);
}

/* Enters the first n keys after launching whatever of this plan is in the way. */
static of_entered enter(of_plan *plan, of_update *update, size_t n, of_list *batch, of_list *done,
                        const void **key) {
    for (;;) {
        of_update *own = NULL;
        of_added added = of_registry_add(update, n, key, &own);
        if (added == OF_ADDED)
            return OF_ENTERED;
        /* The batch goes first: it may be in the way, and no update may wait
         * in it while the lock is dropped. */
        of_launch(plan, batch, OF_AT_ONCE, done);
        if (added == OF_ADD_NO_MEMORY)
            return OF_NOT_ENTERED;
        if (!own || of_is_missing(plan, own))
            return OF_IN_THE_WAY;
        if (!overtake_own(plan, own, update, *key, done)) {
            of_plan_fail(plan);
            return OF_NOT_ENTERED;
        }
    }
}

/* Whatever is on a device when step() ends is launched by step(): no cache gains by waiting for the
 * first use, and a graph that is being captured must have the update. */
static bool may_wait(const of_plan *plan, const of_update *update) {
    return !plan->stopped && !plan->slots[update->slot].eager && update->in.n_keys != 0 &&
           (update->in.device == OF_CPU || plan->mode != OF_FORWARD);
}

/* An exclusive one is created later, and for a gradient that is on its way the lock may be let
 * go. */
static bool is_fit_for_run(const of_plan *plan, const of_update *update) {
    return !update->in.exclusive && !update->in.awaits && may_wait(plan, update);
}

/* At most so many are looked at, since each conflict among them begins another run. */
enum { LONGEST_RUN = 64 };

of_update *of_enter_run(of_update *first) {
    const of_update *behind = first;
    for (int n = 0; n < LONGEST_RUN && behind && is_fit_for_run(first->plan, behind); n++)
        behind = behind->next;
    if (behind == first)
        return first->next;
    of_update *end = of_registry_add_run(first, behind);
    return end == first ? first->next : end;
}

/* The keys are entered before defer(): a thread that meets the host's mark
 * must find the key. */
of_entered of_enter_pending(of_plan *plan, of_update *update, of_list *batch, of_list *done,
                            const void **key) {
    if (update->n_registered != update->in.n_keys || !update->in.n_keys) {
        if (!may_wait(plan, update))
            return OF_NOT_ENTERED;
        const of_entered entered = enter(plan, update, update->in.n_keys, batch, done, key);
        if (entered != OF_ENTERED)
            return entered;
    }
    if (!plan->host.defer(plan->host.ctx, update->in.references)) {
        of_registry_keep_first(update);
        return OF_NOT_ENTERED;
    }
    update->pending = true;
    update->deferred = true;
    of_list_append(&plan->pending[OF_UPDATES], update);
    return OF_ENTERED;
}

/* Only the parameter's key: many gradients may share one buffer, and they are
 * only read. */
of_entered of_enter_batch(of_plan *plan, of_update *update, of_list *batch, of_list *done,
                          const void **key) {
    const size_t n = update->in.n_keys && !update->n_registered ? 1 : 0;
    const of_entered entered = enter(plan, update, n, batch, done, key);
    if (entered == OF_IN_THE_WAY)
        return entered;
    of_list_append(batch, update);
    if (entered != OF_ENTERED)
        of_launch(plan, batch, OF_AT_ONCE, done);
    return entered;
}
