/* SPDX-License-Identifier: BSD-3-Clause */
/* registry.c: which update, and which scaling, is waiting on a piece of memory.
 *
 * For each kind one open-addressing table for the process, at most half full, without
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

typedef struct table {
    entry *entries;
    size_t mask;    /* their number, a power of two, less 1 */
    unsigned shift; /* 64 less its logarithm */
    size_t used;
} table;

/* Guards all of the below; the numbers of members are also read without it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static table tables[OF_KINDS];
static atomic_size_t members; /* of all tables */
static atomic_size_t scalings;

bool of_any_pending(void) {
    return !of_count_is_zero(&members);
}

bool of_registry_has_scalings(void) {
    return !of_count_is_zero(&scalings);
}

void of_registry_lock(void) {
    pthread_mutex_lock(&lock);
}

void of_registry_unlock(void) {
    pthread_mutex_unlock(&lock);
}

/* Fibonacci hashing; addresses differ least in their lowest bits. */
static size_t home(const table *t, const void *key) {
    return (size_t)(((uint64_t)(uintptr_t)key >> 4) * UINT64_C(0x9E3779B97F4A7C15) >> t->shift);
}

/* The entry of the key, or the free one where it belongs. */
static entry *seek(const table *t, const void *key) {
    size_t i = home(t, key);
    while (t->entries[i].key && t->entries[i].key != key)
        i = (i + 1) & t->mask;
    return &t->entries[i];
}

/* The entry that has the key, or NULL. */
static entry *find(int kind, const void *key) {
    const table *t = &tables[kind];
    entry *at = t->entries ? seek(t, key) : NULL;
    return at && at->key ? at : NULL;
}

static bool make_room(table *t, size_t n) {
    if (t->entries && (t->used + n) * 2 <= t->mask + 1)
        return true;
    const unsigned shift = t->entries ? t->shift - 1 : 64 - 10;
    const size_t size = (size_t)1 << (64 - shift);
    entry *fresh = calloc(size, sizeof *fresh);
    if (!fresh)
        return false;
    entry *old = t->entries;
    const size_t old_size = old ? t->mask + 1 : 0;
    t->entries = fresh;
    t->mask = size - 1;
    t->shift = shift;
    for (size_t i = 0; i < old_size; i++)
        if (old[i].key)
            *seek(t, old[i].key) = old[i];
    free(old);
    return true;
}

/* Closes the gap that a removal leaves in its run of entries. */
static void erase(table *t, entry *gone) {
    entry *entries = t->entries;
    const size_t mask = t->mask;
    size_t gap = (size_t)(gone - entries);
    for (size_t i = (gap + 1) & mask; entries[i].key; i = (i + 1) & mask) {
        bool may_move = ((i - home(t, entries[i].key)) & mask) >= ((i - gap) & mask);
        if (may_move) {
            entries[gap] = entries[i];
            gap = i;
        }
    }
    entries[gap].key = NULL;
    t->used--;
}

static void count(const table *t, int change) {
    of_count_change(&members, change);
    if (t == &tables[OF_SCALINGS])
        of_count_change(&scalings, change);
}

static void remove_keys(of_update *update) {
    if (!update->n_registered)
        return;
    table *t = &tables[update->kind->index];
    for (size_t i = 0; i < update->n_registered; i++) {
        const void *key = update->in.keys[i];
        entry *at = key ? seek(t, key) : NULL;
        if (at && at->key && at->update == update)
            erase(t, at);
    }
    count(t, -1);
    update->n_registered = 0;
}

/* On the same stream the new update comes after the one in flight anyway. The
 * plan's lock is held. */
static bool follows(const of_update *update, const of_update *old) {
    return old->plan == update->plan && old->in_flight && update->in.device != OF_CPU &&
           of_stream_equal(&old->in.stream, &update->in.stream);
}

static of_added add_keys(table *t, of_update *update, size_t n, const void **key, of_update **own) {
    count(t, 1);
    for (size_t i = 0; i < n; i++) {
        update->n_registered = i + 1;
        *key = update->in.keys[i];
        if (!*key)
            continue;
        entry *at = seek(t, *key);
        if (!at->key) {
            *at = (entry){*key, update};
            t->used++;
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
    table *t = &tables[update->kind->index];
    pthread_mutex_lock(&lock);
    of_added result = make_room(t, n) ? add_keys(t, update, n, key, own) : OF_ADD_NO_MEMORY;
    pthread_mutex_unlock(&lock);
    return result;
}

bool of_registry_extend(of_update *update, const void *key) {
    of_inputs *in = &update->in;
    table *t = &tables[update->kind->index];
    bool added = false;
    pthread_mutex_lock(&lock);
    if (in->n_keys < OF_MAX_KEYS && update->n_registered == in->n_keys && make_room(t, 1)) {
        entry *at = seek(t, key);
        if ((added = !at->key)) {
            *at = (entry){key, update};
            t->used++;
            in->keys[in->n_keys++] = key;
            update->n_registered++;
        }
    }
    pthread_mutex_unlock(&lock);
    return added;
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

void of_registry_take(int kind, const void *key) {
    pthread_mutex_lock(&lock);
    entry *at = find(kind, key);
    if (at && at->update->in_flight)
        erase(&tables[kind], at);
    pthread_mutex_unlock(&lock);
}

of_update *of_registry_find(int kind, const void *key) {
    if (!key)
        return NULL;
    pthread_mutex_lock(&lock);
    const entry *at = find(kind, key);
    of_update *update = at ? at->update : NULL;
    if (update)
        of_retain(&update->plan->refs);
    pthread_mutex_unlock(&lock);
    return update;
}

unsigned of_scale_factors(const void *key, double factors[OF_MAX_FACTORS], float *norm) {
    unsigned n = 0;
    factors[0] = factors[1] = 1.0;
    *norm = NAN;
    if (!key || !of_registry_has_scalings())
        return 0;
    pthread_mutex_lock(&lock);
    const entry *at = find(OF_SCALINGS, key);
    for (; at && !at->update->in_flight && n < at->update->n_factors; n++)
        factors[n] = at->update->factors[n];
    if (n)
        *norm = at->update->norm;
    pthread_mutex_unlock(&lock);
    return n;
}

bool of_is_scaled(const void *key) {
    double factors[OF_MAX_FACTORS];
    float norm;
    return of_registry_has_scalings() && of_scale_factors(key, factors, &norm) != 0;
}

bool of_registry_has(const void *key) {
    pthread_mutex_lock(&lock);
    const bool has = find(OF_UPDATES, key);
    pthread_mutex_unlock(&lock);
    return has;
}

bool of_is_pending(const void *key) {
    return of_any_pending() && of_registry_has(key);
}

bool of_registry_is_in_flight(const void *key, const of_update *update) {
    pthread_mutex_lock(&lock);
    const entry *at = find(OF_UPDATES, key);
    const bool is = at && at->update == update && update->in_flight;
    pthread_mutex_unlock(&lock);
    return is;
}

bool of_registry_waits_elsewhere(const void *key, const of_plan *plan) {
    pthread_mutex_lock(&lock);
    const entry *at = find(OF_UPDATES, key);
    const bool waits = at && at->update->plan != plan && !at->update->in_flight;
    pthread_mutex_unlock(&lock);
    return waits;
}

bool of_registry_add_factor(const void *key, double factor) {
    bool added = false;
    if (!of_registry_has_scalings())
        return false;
    pthread_mutex_lock(&lock);
    const entry *at = find(OF_SCALINGS, key);
    if (at && at->update->in.device == OF_CPU && at->update->n_factors < OF_MAX_FACTORS) {
        at->update->factors[at->update->n_factors++] = factor;
        at->update->norm = NAN;
        added = true;
    }
    pthread_mutex_unlock(&lock);
    return added;
}
