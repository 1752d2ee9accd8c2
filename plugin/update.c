/* SPDX-License-Identifier: BSD-3-Clause */
/* update.c: update records, from the pool they come from to their end. */
#include <stdlib.h>

#include "internal.h"

_Static_assert(offsetof(of_update, pooled) == 0, "links are cast to their records");

/* Records are freed with their plan and not before: of_access() may look at one
 * that was launched meanwhile. So the pool grows to the most that was ever in
 * use and then allocates no more. */
of_update *of_pool_take(of_plan *plan) {
    if (!plan->spare)
        plan->spare = of_stack_take(&plan->returned);
    of_update *update = (of_update *)plan->spare;
    if (update) {
        plan->spare = update->pooled.next;
    } else {
        update = calloc(1, sizeof *update + plan->host.reference_bytes);
        if (!update) {
            of_set_error("out of memory for an update");
            return NULL;
        }
        update->plan = plan;
    }
    atomic_store_explicit(&update->holders, 1, memory_order_relaxed);
    return update;
}

void of_pool_give(of_plan *plan, of_update *update) {
    of_stack_push(&plan->returned, &update->pooled);
}

static void free_chain(of_link *link) {
    while (link) {
        of_link *next = link->next;
        free(link); /* the record, of which it is the first member */
        link = next;
    }
}

void of_pool_free(of_plan *plan) {
    free_chain(plan->spare);
    free_chain(of_stack_take(&plan->returned));
}

void of_update_drop(of_update *update) {
    if (of_last_lets_go(&update->holders))
        of_pool_give(update->plan, update);
}

/* Two fences for all seals and marks of a launch (fence.h): behind the numbers, and behind the
 * seals. */
static void order_seals_and_marks(const of_plan *plan, const of_list *list) {
    void (*const unseal)(void *, void *) = plan->unseal[list->first->kind->index];
    const of_update *first = list->first;
    while (first && !first->deferred)
        first = first->next;
    if (!first)
        return;
    of_order_marks();
    if (!unseal)
        return;
    for (const of_update *u = first; u; u = u->next)
        if (u->deferred)
            unseal(plan->host.ctx, u->in.references);
    of_order_marks();
}

/* The host lifts its marks before the keys go: a thread that still sees a mark
 * finds the key, waits for this plan's lock, and is then right to go on. A list is of one
 * kind. */
void of_settle(of_plan *plan, of_list *list, of_list *done) {
    if (OF_ORDER_IS_WEAK)
        order_seals_and_marks(plan, list);
    void (*const settle)(void *, void *, bool) = plan->settle[list->first->kind->index];
    if (plan->host.begin_settling)
        plan->host.begin_settling(plan->host.ctx);
    for (of_update *u = list->first; u; u = u->next)
        settle(plan->host.ctx, u->in.references, u->deferred);
    of_registry_remove(list);
    for (of_update *u = list->first, *next; u; u = next) {
        next = u->next;
        u->pending = u->deferred = false;
        of_list_append(done, u);
    }
    *list = (of_list){0};
}

void of_updates_release(of_plan *plan, of_list *list) {
    of_update *update = list->first;
    *list = (of_list){0};
    while (update) {
        of_update *next = update->next;
        plan->host.release(plan->host.ctx, update->in.references);
        of_update_drop(update);
        update = next;
    }
}
