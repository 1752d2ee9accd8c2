/* SPDX-License-Identifier: BSD-3-Clause */
/* registry.c: which update, and which scaling, is waiting on a piece of memory.
 *
 * For each kind one open-addressing table for the process, at most half full. A key stays in its
 * entry when its update has gone, since the next step's update mostly has the same memory; keys
 * without an update are taken out when there are too many. It outlives every plan and is never
 * freed: nothing of ours may run at process exit. An update that is launched at once is in it too,
 * by the key of its parameter, so that two updates of the same memory, of one plan or of two, never
 * run at the same time. */
#include <math.h>
#include <stdlib.h>

#include "internal.h"

typedef struct entry {
    const void *key;   /* NULL: free */
    of_update *update; /* NULL: it has gone */
} entry;

typedef struct table {
    entry *entries;
    size_t mask;    /* their number, a power of two, less 1 */
    unsigned shift; /* 64 less its logarithm */
    size_t used;    /* entries with a key */
    size_t live;    /* those of them that have an update */
} table;

/* Guards all of the below; the numbers of members are also read without it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static table tables[OF_KINDS];
static atomic_size_t members[OF_KINDS];

/* Without the lock. A thread that must see an update as pending was told of it, after it was
 * counted. */
static bool has_any(int kind) {
    return !of_count_is_zero(&members[kind]);
}

/* Scalings first: a gradient's may go when its update has come. */
bool of_any_pending(void) {
    return has_any(OF_SCALINGS) || has_any(OF_UPDATES);
}

bool of_registry_has_updates(void) {
    return has_any(OF_UPDATES);
}

bool of_any_scaled(void) {
    return has_any(OF_SCALINGS);
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

/* The entry of the key, if something is there; or NULL. */
static entry *find(int kind, const void *key) {
    const table *t = &tables[kind];
    entry *at = t->entries ? seek(t, key) : NULL;
    return at && at->update ? at : NULL;
}

/* Into an entry where nothing is. */
static void put(table *t, entry *at, const void *key, of_update *update) {
    if (!at->key) {
        at->key = key;
        t->used++;
    }
    at->update = update;
    t->live++;
}

/* The key stays. */
static void take_out(table *t, entry *at) {
    at->update = NULL;
    t->live--;
}

static bool grow(table *t) {
    const unsigned shift = t->entries ? t->shift - 1 : 64 - 10;
    const size_t size = (size_t)1 << (64 - shift);
    entry *fresh = calloc(size, sizeof *fresh);
    if (!fresh)
        return false;
    const table old = *t;
    *t = (table){fresh, size - 1, shift, 0, 0};
    for (size_t i = 0; old.entries && i <= old.mask; i++)
        if (old.entries[i].update)
            put(t, seek(t, old.entries[i].key), old.entries[i].key, old.entries[i].update);
    free(old.entries);
    return true;
}

/* Takes out keys without an update. Those that stay are put again in order, from behind an entry on
 * that was free before: no run of entries reaches across it, so that none that is still to be put
 * lies between the home of another and its place. */
static void clean(table *t) {
    size_t free_at = 0;
    while (t->entries[free_at].key)
        free_at++;
    for (size_t i = 0; i <= t->mask; i++)
        if (!t->entries[i].update)
            t->entries[i].key = NULL;
    t->used = t->live = 0;
    for (size_t i = 1; i <= t->mask; i++) {
        entry *at = &t->entries[(free_at + i) & t->mask];
        const entry moved = *at;
        *at = (entry){NULL, NULL};
        if (moved.update)
            put(t, seek(t, moved.key), moved.key, moved.update);
    }
}

/* A table of which a quarter or less is live is only cleaned. */
__attribute__((noinline)) static bool make_room_anew(table *t, size_t n) {
    if (!t->entries || (t->live + n) * 4 > t->mask + 1)
        return grow(t);
    clean(t);
    return true;
}

static inline bool make_room(table *t, size_t n) {
    return (t->entries && (t->used + n) * 2 <= t->mask + 1) || make_room_anew(t, n);
}

static void count(int kind, int change) {
    if (change)
        of_count_change(&members[kind], change);
}

/* Where the update's key is, or belongs. */
static entry *find_place(const table *t, of_update *update, size_t i) {
    entry *at = seek(t, update->in.keys[i]);
    update->places[i] = (uint32_t)(at - t->entries);
    return at;
}

static entry *place_of(const table *t, const of_update *update, size_t i) {
    return &t->entries[update->places[i] & t->mask];
}

/* The entry of a key that the update has entered. A key has one: if the noted place still has the key,
 * it is that, also after grow() and clean(). */
static entry *entry_of(const table *t, const of_update *update, size_t i) {
    entry *at = place_of(t, update, i);
    return at->key == update->in.keys[i] ? at : seek(t, update->in.keys[i]);
}

/* All but the first `kept`. */
static void remove_behind(of_update *update, size_t kept) {
    table *t = &tables[update->kind->index];
    const table now = *t; /* but for its counts: the compiler keeps it in registers */
    for (size_t i = kept; i < update->n_registered; i++) {
        entry *at = update->in.keys[i] ? entry_of(&now, update, i) : NULL;
        if (at && at->update == update)
            take_out(t, at);
    }
    update->n_registered = kept;
}

/* Returns whether it had entered any. */
static bool remove_keys(of_update *update) {
    const bool had = update->n_registered != 0;
    remove_behind(update, 0);
    return had;
}

/* On the same stream the new update comes after the one in flight anyway. The
 * plan's lock is held. */
static bool follows(const of_update *update, const of_update *old) {
    return old->plan == update->plan && old->in_flight && update->in.device != OF_CPU &&
           of_stream_equal(&old->in.stream, &update->in.stream);
}

/* From the i-th on; the first of the n keys that another update has, or n. */
static __attribute__((noinline)) size_t enter_other_keys(table *t, of_update *update, size_t i,
                                                         size_t n) {
    const void *const *keys = update->in.keys;
    for (; i < n; i++) {
        entry *at = keys[i] ? find_place(t, update, i) : NULL;
        if (!at)
            continue;
        if (!at->update)
            put(t, at, keys[i], update);
        else if (at->update != update && !follows(update, at->update) && OF_GUARD(rearm))
            break;
        else
            at->update = update;
    }
    return i;
}

/* The first of the n keys that another update has; or n. Those before it are entered. Mostly all
 * are where those of the record's last update were, and nothing is there. */
static size_t enter_keys(table *t, of_update *update, size_t n) {
    const void *const *keys = update->in.keys;
    const table now = *t; /* but for its counts: the compiler keeps it in registers */
    size_t i = 0;
    for (; i < n; i++) {
        entry *at = place_of(&now, update, i);
        if (!keys[i] || at->key != keys[i] || at->update)
            break;
        at->update = update;
    }
    t->live += i;
    return i == n ? n : enter_other_keys(t, update, i, n);
}

/* *change: of the number of members. */
static inline __attribute__((always_inline)) of_added add_keys(table *t, of_update *update,
                                                               size_t n, const void **key,
                                                               of_update **own, int *change) {
    const bool was_in = update->n_registered != 0;
    const size_t entered = enter_keys(t, update, n);
    update->n_registered = n;
    if (entered == n) {
        *change += !was_in;
        return OF_ADDED;
    }
    *key = update->in.keys[entered];
    of_update *other = seek(t, *key)->update;
    *own = other->plan == update->plan ? other : NULL;
    remove_keys(update);
    *change -= was_in;
    return OF_ADD_CONFLICT;
}

of_added of_registry_add(of_update *update, size_t n, const void **key, of_update **own) {
    if (n == 0)
        return OF_ADDED;
    table *t = &tables[update->kind->index];
    int change = 0;
    pthread_mutex_lock(&lock);
    of_added result =
        make_room(t, n) ? add_keys(t, update, n, key, own, &change) : OF_ADD_NO_MEMORY;
    count(update->kind->index, change);
    pthread_mutex_unlock(&lock);
    return result;
}

of_update *of_registry_add_run(of_update *first, const of_update *end) {
    const void *key = NULL;
    of_update *own = NULL, *u = first;
    table *t = &tables[OF_UPDATES];
    int change = 0;
    pthread_mutex_lock(&lock);
    while (u != end && make_room(t, u->in.n_keys) &&
           add_keys(t, u, u->in.n_keys, &key, &own, &change) == OF_ADDED)
        u = u->next;
    count(OF_UPDATES, change);
    pthread_mutex_unlock(&lock);
    return u;
}

bool of_registry_extend(of_update *update, const void *key) {
    of_inputs *in = &update->in;
    table *t = &tables[update->kind->index];
    bool added = false;
    pthread_mutex_lock(&lock);
    if (in->n_keys < OF_MAX_KEYS && update->n_registered == in->n_keys && make_room(t, 1)) {
        in->keys[in->n_keys] = key;
        entry *at = find_place(t, update, in->n_keys);
        if ((added = !at->update)) {
            put(t, at, key, update);
            in->n_keys++;
            update->n_registered++;
        }
    }
    pthread_mutex_unlock(&lock);
    return added;
}

void of_registry_remove(of_list *list) {
    int removed = 0;
    pthread_mutex_lock(&lock);
    for (of_update *update = list->first; update; update = update->next)
        removed += remove_keys(update);
    count(list->first->kind->index, -removed);
    pthread_mutex_unlock(&lock);
}

void of_registry_remove_one(of_update *update) {
    pthread_mutex_lock(&lock);
    count(update->kind->index, -remove_keys(update));
    pthread_mutex_unlock(&lock);
}

void of_registry_remove_in_flight(of_update *first, size_t n) {
    int removed[OF_KINDS] = {0};
    pthread_mutex_lock(&lock);
    for (of_update *u = first; u && n; u = u->next_in_flight, n--)
        removed[u->kind->index] += remove_keys(u);
    for (int kind = 0; kind < OF_KINDS; kind++)
        count(kind, -removed[kind]);
    pthread_mutex_unlock(&lock);
}

void of_registry_keep_first(of_update *update) {
    pthread_mutex_lock(&lock);
    remove_behind(update, 1);
    pthread_mutex_unlock(&lock);
}

void of_registry_take(int kind, const void *key) {
    pthread_mutex_lock(&lock);
    entry *at = find(kind, key);
    if (at && at->update->in_flight)
        take_out(&tables[kind], at);
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
    if (!key || !of_any_scaled())
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
    return of_any_scaled() && of_scale_factors(key, factors, &norm) != 0;
}

static bool has(const void *key) {
    pthread_mutex_lock(&lock);
    const bool has = find(OF_UPDATES, key);
    pthread_mutex_unlock(&lock);
    return has;
}

bool of_is_pending(const void *key) {
    return of_any_pending() && has(key);
}

void of_registry_end_reading(const void *key) {
    pthread_mutex_lock(&lock);
    const entry *at = find(OF_SCALINGS, key);
    if (at)
        atomic_fetch_sub(&at->update->readers, 1);
    pthread_mutex_unlock(&lock);
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
    if (!of_any_scaled())
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
