/* SPDX-License-Identifier: BSD-3-Clause */
/* plans.c: every plan of the process, for flush_all and fork. */
#include "internal.h"

/* Guards the list. A plan is taken out after its last reference has gone, so
 * one that is retained stays in. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static of_plan *newest;

void of_plans_add(of_plan *plan) {
    pthread_mutex_lock(&lock);
    plan->older = newest;
    if (newest)
        newest->newer = plan;
    newest = plan;
    pthread_mutex_unlock(&lock);
}

void of_plans_remove(of_plan *plan) {
    pthread_mutex_lock(&lock);
    if (plan->newer)
        plan->newer->older = plan->older;
    else
        newest = plan->older;
    if (plan->older)
        plan->older->newer = plan->newer;
    pthread_mutex_unlock(&lock);
}

/* Fails for a plan that is being freed. */
static bool try_retain(of_plan *plan) {
    size_t refs = atomic_load_explicit(&plan->refs, memory_order_relaxed);
    while (refs)
        if (atomic_compare_exchange_weak_explicit(&plan->refs, &refs, refs + 1,
                                                  memory_order_relaxed, memory_order_relaxed))
            return true;
    return false;
}

/* The next plan after this one (NULL: the first), retained. */
static of_plan *next_plan(const of_plan *after) {
    pthread_mutex_lock(&lock);
    of_plan *plan = after ? after->older : newest;
    while (plan && !try_retain(plan))
        plan = plan->older;
    pthread_mutex_unlock(&lock);
    return plan;
}

void of_plans_each(void (*visit)(of_plan *plan)) {
    of_plan *plan = next_plan(NULL);
    while (plan) {
        visit(plan);
        of_plan *next = next_plan(plan);
        of_plan_unref(plan);
        plan = next;
    }
}

static void flush(of_plan *plan) {
    of_plan_flush(plan);
}

void of_flush_all(void) {
    if (of_any_pending())
        of_plans_each(flush);
}

void of_plans_lock(void (*visit)(of_plan *plan)) {
    pthread_mutex_lock(&lock);
    for (of_plan *plan = newest; plan; plan = plan->older) {
        pthread_mutex_lock(&plan->lock);
        visit(plan);
    }
}

void of_plans_unlock(void) {
    for (of_plan *plan = newest; plan; plan = plan->older)
        pthread_mutex_unlock(&plan->lock);
    pthread_mutex_unlock(&lock);
}

/* A thread that was in step() when another one forked does not exist in the
 * child, but would own its plan's layout for ever. */
void of_plans_adopt(void) {
    for (of_plan *plan = newest; plan; plan = plan->older)
        pthread_rwlock_init(&plan->layout, NULL);
}
