/* SPDX-License-Identifier: BSD-3-Clause */
/* await.c: updates whose gradient is still on its way, from other processes for example. Such
 * an update is created and left pending like any other, and is launched when the gradient is
 * there. To wait for that takes as long as a network does, so nobody waits under a lock. */
#include "internal.h"

bool of_is_missing(const of_plan *plan, of_update *update) {
    if (!update->in.awaits || !OF_GUARD(await))
        return false;
    if (!plan->host.await->has_arrived(update->in.awaits))
        return true;
    update->in.awaits = NULL;
    return false;
}

bool of_await(of_plan *plan, const void *key) {
    pthread_mutex_unlock(&plan->lock);
    const bool arrived = plan->host.await->await(key);
    pthread_mutex_lock(&plan->lock);
    return arrived;
}

/* Updates that another thread leaves pending meanwhile are awaited, too. */
of_status of_await_pending(of_plan *plan) {
    bool arrived = true;
    pthread_mutex_lock(&plan->lock);
    of_update *u = plan->pending[OF_UPDATES].first;
    while (u && arrived) {
        const bool missing = of_is_missing(plan, u);
        arrived = !missing || of_await(plan, u->in.awaits);
        u = missing ? plan->pending[OF_UPDATES].first : u->next;
    }
    pthread_mutex_unlock(&plan->lock);
    return arrived ? OF_OK : OF_REFUSED;
}
