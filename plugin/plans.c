/* SPDX-License-Identifier: BSD-3-Clause */
/* plans.c: every plan of the process, for flush_all and fork, and the end of each. */
#include <stdlib.h>

#include "internal.h"

/* Guards the list. A plan is taken out after its last reference has gone, so
 * one that is retained stays in. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static of_plan *newest;

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

void of_plans_add(of_plan *plan) {
    pthread_mutex_lock(&lock);
    plan->older = newest;
    if (newest)
        newest->newer = plan;
    newest = plan;
    pthread_mutex_unlock(&lock);
}

static void remove_plan(of_plan *plan) {
    pthread_mutex_lock(&lock);
    if (plan->newer)
        plan->newer->older = plan->older;
    else
        newest = plan->older;
    if (plan->older)
        plan->older->newer = plan->newer;
    pthread_mutex_unlock(&lock);
}

void of_pass_free(of_pass *pass) {
    for (of_waiting *waiting = pass ? pass->waiting : NULL, *next; waiting; waiting = next) {
        next = waiting->next;
        free(waiting->batch.slots);
        free(waiting);
    }
    free(pass);
}

void of_plan_unref(of_plan *plan) {
    if (!of_was_last(&plan->refs))
        return;
    remove_plan(plan);
    free(plan->queues);
    free(plan->spare_batch.slots);
    of_pass_free(plan->spare_pass);
    of_pool_free(plan);
    pthread_mutex_destroy(&plan->lock);
    pthread_rwlock_destroy(&plan->layout);
    free(plan);
}

/* The next plan after this one (NULL: the first), retained. */
static of_plan *next_plan(const of_plan *after) {
    pthread_mutex_lock(&lock);
    of_plan *plan = after ? after->older : newest;
    while (plan && !of_try_retain(&plan->refs))
        plan = plan->older;
    pthread_mutex_unlock(&lock);
    return plan;
}

of_status of_plans_each(of_status (*visit)(of_plan *plan)) {
    of_status all = OF_OK;
    of_plan *plan = next_plan(NULL);
    while (plan) {
        const of_status status = visit(plan);
        all = status == OF_OK ? all : status;
        of_plan *next = next_plan(plan);
        of_plan_unref(plan);
        plan = next;
    }
    return all;
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
