/* SPDX-License-Identifier: BSD-3-Clause */
/* factors.c: see factors.h. */
#include "planners/kfac/factors.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct of_slot_state {
    of_factor_slot now;
    size_t elements;
    uint64_t expected; /* uses in the last collection that ended; 0: not known */
} of_slot_state;

struct of_factors {
    of_factors_host host; /* constant, like n */
    size_t n;
    atomic_uint_fast64_t running; /* the collection; written under the lock */
    pthread_mutex_t lock;         /* everything below */
    uint64_t last;                /* collection */
    size_t next;                  /* the first place in the order that was not sent */
    size_t sent;                  /* messages */
    of_slot_state *slots;
    uint32_t *order; /* slots by place */
    uint32_t *group; /* by place */
    uint32_t *place; /* by slot */
};

static bool allocate(of_factors *f, size_t n) {
    f->slots = calloc(n, sizeof *f->slots);
    f->order = calloc(n, sizeof *f->order);
    f->group = calloc(n, sizeof *f->group);
    f->place = calloc(n, sizeof *f->place);
    return f->slots != NULL && f->order != NULL && f->group != NULL && f->place != NULL;
}

static void free_all(of_factors *f) {
    free(f->slots);
    free(f->order);
    free(f->group);
    free(f->place);
    free(f);
}

static void put_in_place(of_factors *f) {
    size_t offset = 0;
    for (size_t at = 0; at < f->n; at++) {
        of_slot_state *slot = &f->slots[f->order[at]];
        f->place[f->order[at]] = (uint32_t)at;
        slot->now.offset = offset;
        offset += slot->elements;
    }
}

static bool have_elements(const size_t *elements, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (elements[i] == 0)
            return false;
    return true;
}

of_status of_factors_create(const size_t *elements, size_t n, const of_factors_host *host,
                            of_factors **out) {
    *out = NULL;
    if (n == 0 || n > UINT32_MAX || !have_elements(elements, n)) {
        of_set_error("factors need slots, each with elements");
        return OF_INVALID;
    }
    of_factors *f = calloc(1, sizeof *f);
    if (f == NULL || !allocate(f, n) || pthread_mutex_init(&f->lock, NULL) != 0) {
        if (f != NULL)
            free_all(f);
        of_set_error("out of memory for %zu factors", n);
        return OF_NO_MEMORY;
    }
    memcpy(&f->host, host, host->struct_size < sizeof f->host ? host->struct_size : sizeof f->host);
    f->n = n;
    atomic_init(&f->running, 0);
    for (uint32_t i = 0; i < n; i++) {
        f->slots[i].elements = elements[i];
        f->order[i] = f->group[i] = i;
    }
    put_in_place(f);
    *out = f;
    return OF_OK;
}

void of_factors_destroy(of_factors *f) {
    if (f == NULL)
        return;
    pthread_mutex_destroy(&f->lock);
    free_all(f);
}

/* seen: n zeros. */
static bool has_each_once(const uint32_t *order, size_t n, bool *seen) {
    for (size_t at = 0; at < n; at++) {
        if (order[at] >= n || seen[order[at]])
            return false;
        seen[order[at]] = true;
    }
    return true;
}

static bool are_groups(const uint32_t *group, size_t n) {
    if (group[0] != 0)
        return false;
    for (size_t at = 1; at < n; at++)
        if (group[at] != group[at - 1] && group[at] != group[at - 1] + 1)
            return false;
    return true;
}

of_status of_factors_arrange(of_factors *f, const uint32_t *order, const uint32_t *group) {
    bool *seen = calloc(f->n, sizeof *seen);
    if (seen == NULL) {
        of_set_error("out of memory for %zu factors", f->n);
        return OF_NO_MEMORY;
    }
    const bool valid = has_each_once(order, f->n, seen) && are_groups(group, f->n);
    free(seen);
    if (!valid || of_factors_collection(f) != 0) {
        of_set_error(valid ? "factors can't be arranged while they are collected"
                           : "an arrangement of %zu factors has each of them once, in groups that "
                             "count from 0",
                     f->n);
        return OF_INVALID;
    }
    pthread_mutex_lock(&f->lock);
    memcpy(f->order, order, f->n * sizeof *order);
    memcpy(f->group, group, f->n * sizeof *group);
    put_in_place(f);
    pthread_mutex_unlock(&f->lock);
    return OF_OK;
}

uint64_t of_factors_begin(of_factors *f) {
    pthread_mutex_lock(&f->lock);
    for (size_t i = 0; i < f->n; i++)
        f->slots[i].now = (of_factor_slot){.offset = f->slots[i].now.offset};
    f->next = f->sent = 0;
    const uint64_t number = ++f->last;
    atomic_store(&f->running, number);
    pthread_mutex_unlock(&f->lock);
    return number;
}

uint64_t of_factors_collection(const of_factors *f) {
    return atomic_load(&f->running);
}

/* The place behind the group that begins here, and its elements. */
static size_t end_of_group(const of_factors *f, size_t at, size_t *elements) {
    const uint32_t group = f->group[at];
    *elements = 0;
    for (; at < f->n && f->group[at] == group; at++)
        *elements += f->slots[f->order[at]].elements;
    return at;
}

static bool is_complete(const of_factors *f, size_t from, size_t to) {
    for (size_t at = from; at < to; at++) {
        const of_slot_state *slot = &f->slots[f->order[at]];
        if (slot->expected == 0 || slot->now.uses < slot->expected)
            return false;
    }
    return true;
}

/* As far as groups are complete, or all. false: the host failed. */
static bool send(of_factors *f, bool all) {
    while (f->next < f->n) {
        size_t elements = 0;
        const size_t end = end_of_group(f, f->next, &elements);
        if (!all && !is_complete(f, f->next, end))
            return true;
        const size_t offset = f->slots[f->order[f->next]].now.offset;
        f->next = end; /* before it is sent: a failure must not send it twice */
        f->sent++;
        if (!f->host.reduce(f->host.ctx, offset, elements)) {
            of_set_error("a message with factors was not sent");
            return false;
        }
    }
    return true;
}

static of_status add(of_factors *f, of_slot_state *slot, size_t place, const void *contribution) {
    const bool late = place < f->next;
    if (!f->host.add(f->host.ctx, contribution, slot->now.offset, late)) {
        of_set_error("a contribution to a factor was not added");
        return OF_REFUSED;
    }
    slot->now.late |= late;
    slot->now.uses++;
    return send(f, false) ? OF_OK : OF_REFUSED;
}

of_status of_factors_add(of_factors *f, size_t slot, uint64_t collection, double rows,
                         double seconds, const void *contribution) {
    of_status status = OF_OK;
    pthread_mutex_lock(&f->lock);
    if (collection != 0 && collection == of_factors_collection(f)) {
        f->slots[slot].now.rows += rows;
        f->slots[slot].now.seconds = seconds;
        status = add(f, &f->slots[slot], f->place[slot], contribution);
    }
    pthread_mutex_unlock(&f->lock);
    return status;
}

of_status of_factors_end(of_factors *f) {
    bool sent = true;
    pthread_mutex_lock(&f->lock);
    if (atomic_exchange(&f->running, 0) != 0) {
        sent = send(f, true);
        for (size_t i = 0; i < f->n; i++)
            f->slots[i].expected = f->slots[i].now.uses;
    }
    pthread_mutex_unlock(&f->lock);
    return sent ? OF_OK : OF_REFUSED;
}

void of_factors_slots(of_factors *f, of_factor_slot *out) {
    pthread_mutex_lock(&f->lock);
    for (size_t i = 0; i < f->n; i++)
        out[i] = f->slots[i].now;
    pthread_mutex_unlock(&f->lock);
}

size_t of_factors_sent(of_factors *f) {
    pthread_mutex_lock(&f->lock);
    const size_t sent = f->sent;
    pthread_mutex_unlock(&f->lock);
    return sent;
}
