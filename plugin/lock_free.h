/* SPDX-License-Identifier: BSD-3-Clause */
/* lock_free.h: the steps that threads take on shared memory without a lock. Each says why its
 * memory orders are enough where a processor's order is weak (AArch64);
 * tests/plugin/test_relaxed.cpp runs these very bodies under the memory model of C11, and fails for
 * each order that is weaker. What is in no function here is read and written under a lock. */
#ifndef OPTFUSE_LOCK_FREE_H
#define OPTFUSE_LOCK_FREE_H

#ifndef OF_MODEL_CHECKED
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "membarrier.h"

/* The first member of what is on a stack. */
typedef struct of_link {
    struct of_link *next;
} of_link;
#endif

/* A count that changes under a lock and is read without it. Who reads 0 sees all that was written
 * before each change: every change is a read and a write in one that releases, so that the last
 * one carries on those before. Who must see another number was told so by the thread that counted
 * up, and what tells it orders the two. */
static inline void of_count_change(atomic_size_t *count, int change) {
    atomic_fetch_add_explicit(count, (size_t)change, memory_order_release);
}

static inline bool of_count_is_zero(const atomic_size_t *count) {
    return atomic_load_explicit(count, memory_order_acquire) == 0;
}

/* References. One more is taken by whoever has one, so that nothing needs an order. */
static inline void of_retain(atomic_size_t *refs) {
    atomic_fetch_add_explicit(refs, 1, memory_order_relaxed);
}

/* Whether that was the last one. Then all that others did with theirs has happened before: each
 * gives back by a release, and the last acquires them all. */
static inline bool of_was_last(atomic_size_t *refs) {
    return atomic_fetch_sub_explicit(refs, 1, memory_order_acq_rel) == 1;
}

/* Without a reference of one's own; false for what is being freed. A lock must keep the memory
 * from being freed meanwhile, and what one may read there is ordered by that lock, too: the
 * number itself needs no order. */
static inline bool of_try_retain(atomic_size_t *refs) {
    size_t n = atomic_load_explicit(refs, memory_order_relaxed);
    while (n)
        if (atomic_compare_exchange_weak_explicit(refs, &n, n + 1, memory_order_relaxed,
                                                  memory_order_relaxed))
            return true;
    return false;
}

/* As of_was_last(), for holders of whom none can come once there is one only: this one then
 * need not write. */
static inline bool of_last_lets_go(atomic_size_t *holders) {
    return atomic_load_explicit(holders, memory_order_acquire) == 1 || of_was_last(holders);
}

/* One holder more, if the caller is the only one: nobody else can add one then. What the others did
 * has happened before, since each gave back by a release. */
static inline bool of_hold_alone(atomic_size_t *holders) {
    const bool alone = atomic_load_explicit(holders, memory_order_acquire) == 1;
    if (alone)
        atomic_store_explicit(holders, 2, memory_order_relaxed);
    return alone;
}

/* A stack onto which many push and which one empties: no head can come back meanwhile under the
 * same address, since nobody takes a single record off. A push releases what was written to the
 * record, and each later push, being a read and a write in one, carries that on to who acquires. */
static inline void of_stack_push(_Atomic(of_link *) *stack, of_link *link) {
    of_link *head = atomic_load_explicit(stack, memory_order_relaxed);
    do
        link->next = head;
    while (!atomic_compare_exchange_weak_explicit(stack, &head, link, memory_order_release,
                                                  memory_order_relaxed));
}

/* All of it, the last that was pushed first. */
static inline of_link *of_stack_take(_Atomic(of_link *) *stack) {
    return atomic_exchange_explicit(stack, NULL, memory_order_acquire);
}

/* The step between memory and its seal, and between that and its mark (fence.h). Who reads that the
 * mark is gone has passed the fence before it reads the seal and the memory: it can't have read the
 * mark before the fence, where the mark was still there. Without a fence marks are kept from here
 * on. Who takes one off found nothing pending, by a count or under a lock, and so knows of each
 * fence that failed before: the flag itself needs no order. */
static inline void of_order_or_keep(atomic_bool *kept) {
    if (!of_fence_all())
        atomic_store_explicit(kept, true, memory_order_relaxed);
}

static inline bool of_are_kept(const atomic_bool *kept) {
    return atomic_load_explicit(kept, memory_order_relaxed);
}

#endif
