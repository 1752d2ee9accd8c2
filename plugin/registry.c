/* SPDX-License-Identifier: BSD-3-Clause */
/* registry.c: which update is waiting on a piece of memory.
 *
 * One open-addressing table for the process, at most half full, without
 * tombstones. It outlives every plan and is never freed: nothing of ours may
 * run at process exit. An update that is launched at once is in it too, by the
 * key of its parameter, so that two updates of the same memory, of one plan or
 * of two, never run at the same time. */
#include <math.h>
#include <stdlib.h>

#include "internal.h"

typedef struct entry {
    const void *key; /* NULL: free */
    of_update *update;
} entry;

/* Guards all of the below; `updates` is also read without it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static entry *table;
static unsigned bits; /* the table has 1 << bits entries */
static size_t used;
static atomic_size_t updates;
static atomic_size_t scalings; /* those among them; also read without it */

bool of_any_pending(void) {
    return atomic_load_explicit(&updates, memory_order_acquire) != 0;
}

void of_registry_lock(void) {
    pthread_mutex_lock(&lock);
}

void of_registry_unlock(void) {
    pthread_mutex_unlock(&lock);
}

/* Fibonacci hashing; addresses differ least in their lowest bits. */
static size_t home(const void *key) {
    return (size_t)(((uint64_t)(uintptr_t)key >> 4) * UINT64_C(0x9E3779B97F4A7C15) >> (64 - bits));
}

/* The entry of the key, or the free one where it belongs. */
static entry *seek(const void *key) {
    size_t mask = ((size_t)1 << bits) - 1;
    size_t i = home(key);
    while (table[i].key && table[i].key != key)
        i = (i + 1) & mask;
    return &table[i];
}

static bool make_room(size_t n) {
    if (table && (used + n) * 2 <= (size_t)1 << bits)
        return true;
    unsigned wider = table ? bits + 1 : 10;
    entry *fresh = calloc((size_t)1 << wider, sizeof *fresh);
    if (!fresh)
        return false;
    entry *old = table;
    size_t old_size = old ? (size_t)1 << bits : 0;
    table = fresh;
    bits = wider;
    for (size_t i = 0; i < old_size; i++)
        if (old[i].key)
            *seek(old[i].key) = old[i];
    free(old);
    return true;
}

/* Closes the gap that a removal leaves in its run of entries. */
static void erase(entry *gone) {
    size_t mask = ((size_t)1 << bits) - 1;
    size_t gap = (size_t)(gone - table);
    for (size_t i = (gap + 1) & mask; table[i].key; i = (i + 1) & mask) {
        bool may_move = ((i - home(table[i].key)) & mask) >= ((i - gap) & mask);
        if (may_move) {
            table[gap] = table[i];
            gap = i;
        }
    }
    table[gap].key = NULL;
    used--;
}

static void remove_keys(of_update *update) {
    for (size_t i = 0; i < update->n_registered; i++) {
        const void *key = update->in.keys[i];
        entry *at = key ? seek(key) : NULL;
        if (at && at->key && at->update == update)
            erase(at);
    }
    if (update->n_registered) {
        atomic_fetch_sub_explicit(&updates, 1, memory_order_release);
        atomic_fetch_sub_explicit(&scalings, update->scaling, memory_order_release);
    }
    update->n_registered = 0;
}

/* On the same stream the new update comes after the one in flight anyway. The
 * plan's lock is held. */
static bool follows(const of_update *update, const of_update *old) {
    return old->plan == update->plan && old->flying && update->in.device != OF_CPU &&
           of_stream_equal(&old->in.stream, &update->in.stream);
}

static of_added add_keys(of_update *update, size_t n, const void **key, of_update **own) {
    atomic_fetch_add_explicit(&updates, 1, memory_order_release);
    atomic_fetch_add_explicit(&scalings, update->scaling, memory_order_release);
    for (size_t i = 0; i < n; i++) {
        update->n_registered = i + 1;
        *key = update->in.keys[i];
        if (!*key)
            continue;
        entry *at = seek(*key);
        if (!at->key) {
            *at = (entry){*key, update};
            used++;
        } else if (at->update != update && !follows(update, at->update) && OF_GUARD(rearm)) {
            *own = at->update->plan == update->plan ? at->update : NULL;
            remove_keys(update);
            return OF_ADD_CONFLICT;
        } else
            at->update = update;
    }
    return OF_ADDED;
}

of_added of_registry_add(of_update *update, size_t n, const void **key, of_update **own) {
    if (n == 0)
        return OF_ADDED;
    pthread_mutex_lock(&lock);
    of_added result = make_room(n) ? add_keys(update, n, key, own) : OF_ADD_NO_MEMORY;
    pthread_mutex_unlock(&lock);
    return result;
}

void of_registry_remove(of_list *list) {
    pthread_mutex_lock(&lock);
    for (of_update *update = list->first; update; update = update->next)
        remove_keys(update);
    pthread_mutex_unlock(&lock);
}

void of_registry_remove_one(of_update *update) {
    pthread_mutex_lock(&lock);
    remove_keys(update);
    pthread_mutex_unlock(&lock);
}

void of_registry_take(const void *key) {
    pthread_mutex_lock(&lock);
    entry *at = table ? seek(key) : NULL;
    if (at && at->key && at->update->flying)
        erase(at);
    pthread_mutex_unlock(&lock);
}

of_update *of_registry_find(const void *key) {
    if (!key)
        return NULL;
    pthread_mutex_lock(&lock);
    of_update *update = NULL;
    if (table) {
        entry *at = seek(key);
        if (at->key) {
            update = at->update;
            atomic_fetch_add_explicit(&update->plan->refs, 1, memory_order_relaxed);
        }
    }
    pthread_mutex_unlock(&lock);
    return update;
}

bool of_registry_has_scalings(void) {
    return atomic_load_explicit(&scalings, memory_order_acquire) != 0;
}

unsigned of_registry_factors(const void *key, double factors[OF_MAX_FACTORS], float *norm) {
    unsigned n = 0;
    factors[0] = factors[1] = 1.0;
    *norm = NAN;
    if (!key || !of_registry_has_scalings())
        return 0;
    pthread_mutex_lock(&lock);
    const entry *at = seek(key);
    for (; at->key && !at->update->flying && n < at->update->n_factors; n++)
        factors[n] = at->update->factors[n];
    if (n)
        *norm = at->update->norm;
    pthread_mutex_unlock(&lock);
    return n;
}

bool of_registry_has(const void *key) {
    pthread_mutex_lock(&lock);
    const entry *at = table ? seek(key) : NULL;
    const bool has = at && at->key;
    pthread_mutex_unlock(&lock);
    return has;
}

bool of_registry_flies(const void *key, const of_update *update) {
    pthread_mutex_lock(&lock);
    const entry *at = table ? seek(key) : NULL;
    const bool flies = at && at->key && at->update == update && update->flying;
    pthread_mutex_unlock(&lock);
    return flies;
}

bool of_registry_waits_elsewhere(const void *key, const of_plan *plan) {
    pthread_mutex_lock(&lock);
    const entry *at = table ? seek(key) : NULL;
    const bool waits = at && at->key && at->update->plan != plan && !at->update->flying;
    pthread_mutex_unlock(&lock);
    return waits;
}

bool of_registry_add_factor(const void *key, double factor) {
    bool added = false;
    if (!of_registry_has_scalings())
        return false;
    pthread_mutex_lock(&lock);
    const entry *at = seek(key);
    if (at->key && at->update->in.device == OF_CPU && at->update->n_factors < OF_MAX_FACTORS) {
        at->update->factors[at->update->n_factors++] = factor;
        at->update->norm = NAN;
        added = true;
    }
    pthread_mutex_unlock(&lock);
    return added;
}
