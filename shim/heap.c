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
#define _DEFAULT_SOURCE
#include "heap.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

enum { LARGEST = 32 << 20, ITS_OWN = 64 << 10, TRIES = 256, NOTICED = 4 << 20 };

static atomic_size_t users;
/* Guards what follows. Nobody waits for it, since a fork may have left it taken. */
static pthread_mutex_t heap_lock = PTHREAD_MUTEX_INITIALIZER;
static void *pin;
static uintptr_t pinned; /* the end of the heap then */

static uintptr_t end_now(void) {
    return (uintptr_t)sbrk(0);
}

static void teach(void) {
    void *volatile block = malloc(LARGEST - ITS_OWN); /* else the compiler leaves both out */
    free(block);
}

/* A block that fills no hole begins where the last one in use ends. What malloc keeps
 * behind that is less than two such blocks. */
static void *put_at_the_end(void) {
    void *blocks[TRIES];
    size_t n = 0;
    do
        blocks[n] = malloc(LARGEST - ITS_OWN);
    while (blocks[n] && (uintptr_t)blocks[n] + 3 * LARGEST < end_now() && ++n < TRIES - 1);
    void *last = blocks[n] ? realloc(blocks[n], 1) : NULL;
    if (!last)
        free(blocks[n]);
    while (n > 0)
        free(blocks[--n]);
    return last;
}

void of_heap_use(void) {
    atomic_fetch_add(&users, 1);
    teach();
}

void of_heap_leave(void) {
    if (atomic_fetch_sub(&users, 1) != 1 || pthread_mutex_trylock(&heap_lock) != 0)
        return;
    void *old = pin;
    pin = NULL;
    pthread_mutex_unlock(&heap_lock);
    free(old);
}

void of_heap_begin_backward(void) {
    void *old = NULL;
    const uintptr_t end = end_now();
    if (pthread_mutex_trylock(&heap_lock) != 0)
        return;
    if (!pin || end > pinned + NOTICED) {
        old = pin;
        pin = put_at_the_end();
        pinned = end;
    }
    pthread_mutex_unlock(&heap_lock);
    free(old);
}
