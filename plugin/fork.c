/* SPDX-License-Identifier: BSD-3-Clause */
/* fork.c: a child gets a copy of the memory but none of the other threads, so
 * nothing may be pending and no lock held by them when it is made. */
#include "internal.h"

static atomic_bool is_child;

static void note_child(void) {
    atomic_store_explicit(&is_child, true, memory_order_relaxed);
}

/* From the moment on that the library is loaded: the parent may have no plan yet. */
__attribute__((constructor)) static void note_children(void) {
    pthread_atfork(NULL, NULL, note_child);
}

bool of_is_forked(void) {
    return atomic_load_explicit(&is_child, memory_order_relaxed);
}

/* Another thread may have left updates pending after the flush. No hold can be
 * released before the locks are free again. */
static void launch_late(of_plan *plan) {
    if (!OF_GUARD(fork))
        return;
    of_launch(plan, &plan->pending, OF_AT_CLOSE, &plan->forked);
    of_launch_scalings(plan, &plan->forked);
}

void of_fork_prepare(void) {
    if (OF_GUARD(fork))
        of_flush_all();
    of_plans_lock(launch_late);
    of_registry_lock();
}

static void release_late(of_plan *plan) {
    pthread_mutex_lock(&plan->lock);
    of_list forked = plan->forked;
    plan->forked = (of_list){0};
    pthread_mutex_unlock(&plan->lock);
    of_updates_release(plan, &forked);
}

void of_fork_parent(void) {
    of_registry_unlock();
    of_plans_unlock();
    of_plans_each(release_late);
}

void of_fork_child(void) {
    of_plans_adopt();
    of_fork_parent();
}
