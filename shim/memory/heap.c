/* SPDX-License-Identifier: BSD-3-Clause */
/* heap.c: backward fusion frees each gradient while others are still to be made, and
 * at the end of backward none is left. glibc's malloc may then give the end of its heap
 * back to the system and have to take it again, page fault by page fault, in each
 * iteration. Two things keep it, and no setting of the user's is changed:
 *
 * - From a large block that is freed malloc learns that blocks of its size come and go,
 *   and keeps twice as much at the end: mallopt(3), M_MMAP_THRESHOLD. It is shown the
 *   largest block it learns from, which is never touched.
 * - A few bytes are put there when backward begins and all activations exist, and
 *   again when the heap has become larger. Without optfuse gradients lie there, which
 *   live until zero_grad().
 *
 * Other allocators don't move the end, and have other ways. */
#include "memory/heap.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

enum {
    LARGEST = 32 << 20,
    ITS_OWN = 64 << 10,
    NOTICED = 4 << 20, /* growth of the heap */
    TRIES = 64,
    PIN_BYTES = 2048 /* malloc joins what it frees with its neighbours, unlike less */
};

static atomic_size_t users;
static atomic_bool keeps_all; /* of_heap_keep(): malloc learns nothing any more */
/* Guards what follows. It is tried and never waited for: a fork may have left it taken. */
static pthread_mutex_t heap_lock = PTHREAD_MUTEX_INITIALIZER;
static void *pin;
static uintptr_t pinned; /* the end of the heap then */

static uintptr_t end_now(void) {
    return (uintptr_t)sbrk(0);
}

static void teach(void) {
    if (atomic_load(&keeps_all))
        return;
    void *volatile block = malloc(LARGEST - ITS_OWN); /* else the compiler leaves both out */
    free(block);
}

/* Behind the last block in use malloc keeps twice the largest. */
static bool is_at_the_end(const void *block) {
    return (uintptr_t)block + 2 * LARGEST + NOTICED >= end_now();
}

/* A block that fills no hole begins where the last one in use ends. NULL: none was to be
 * had, as where memory is not from the main heap but lies below it. */
static void *put_at_the_end(void) {
    void *blocks[TRIES];
    void *found = NULL;
    size_t n = 0;
    while (!found && n < TRIES && (blocks[n] = malloc(LARGEST - ITS_OWN))) {
        if (is_at_the_end(blocks[n]))
            found = blocks[n];
        else
            n++;
    }
    void *small = found ? realloc(found, PIN_BYTES) : NULL;
    if (found && !small)
        free(found);
    while (n > 0)
        free(blocks[--n]);
    return small;
}

#ifdef __GLIBC__
/* -1 is the largest size. Before 2.35 a threshold above 32 MB is refused, and a limit of the number
 * of such blocks is taken. */
static bool keep_large_blocks(void) {
    return mallopt(M_MMAP_THRESHOLD, -1) == 1 || mallopt(M_MMAP_MAX, 0) == 1;
}

bool of_heap_keep(void) {
    const bool done = keep_large_blocks() && mallopt(M_TRIM_THRESHOLD, -1) == 1;
    if (done)
        atomic_store(&keeps_all, true);
    return done;
}
#else
bool of_heap_keep(void) {
    return false;
}
#endif

void of_heap_use(void) {
    atomic_fetch_add(&users, 1);
    teach();
}

void of_heap_leave(void) {
    if (atomic_fetch_sub(&users, 1) != 1 || pthread_mutex_trylock(&heap_lock) != 0)
        return;
    void *old = pin;
    pin = NULL;
    pinned = 0;
    pthread_mutex_unlock(&heap_lock);
    free(old);
}

void of_heap_begin_backward(void) {
    void *old = NULL;
    if (pthread_mutex_trylock(&heap_lock) != 0)
        return;
    if (end_now() > pinned + NOTICED) {
        old = pin;
        pin = put_at_the_end();
        pinned = end_now();
    }
    pthread_mutex_unlock(&heap_lock);
    free(old);
}
