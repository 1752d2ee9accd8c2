/* SPDX-License-Identifier: BSD-3-Clause */
/* fusion.c: which messages are fused. */
#include <math.h>
#include <stdlib.h>

#include "fail.h"
#include "planners/kfac/messages.h"

/* Messages that were checked: no sum of their bytes or seconds overflows. */
typedef struct messages {
    const double *ready;
    const uint64_t *bytes;
    size_t n;
    of_network_link link;
    double processor; /* seconds that each message takes of it */
} messages;

static double seconds_of(const messages *m, uint64_t bytes) {
    return of_seconds_over(&m->link, bytes);
}

/* Each message alone, after the last one is ready, is the latest that any grouping finishes. */
static of_status check_sums(const messages *m) {
    uint64_t bytes = 0;
    double ready = 0;
    for (size_t i = 0; i < m->n; i++) {
        if (!of_is_time(m->ready[i]))
            return of_fail(OF_INVALID,
                           "message %zu is ready at %g s: give a time that is not negative, "
                           "counted from a moment before all messages",
                           i, m->ready[i]);
        if (m->bytes[i] > UINT64_MAX - bytes)
            return of_fail(OF_INVALID, "the bytes of %zu messages do not fit 64 bits: check them",
                           m->n);
        bytes += m->bytes[i];
        ready = of_later(ready, m->ready[i]);
    }
    const double last = ready + (double)m->n * (m->link.latency + m->processor) +
                        (double)bytes * m->link.seconds_per_byte;
    if (!of_is_time(last))
        return of_fail(OF_INVALID, "the seconds of %zu messages are out of range: check the link",
                       m->n);
    return OF_OK;
}

static of_status check(messages *m, const double *ready, const uint64_t *bytes, size_t n,
                       const of_network_link *link, double processor, const void *group,
                       const void *out) {
    if (!out || (n && (!ready || !bytes || !group)))
        return of_fail(OF_INVALID,
                       "messages need ready times, bytes, groups and a place for the result");
    if (n > UINT32_MAX)
        return of_fail(OF_INVALID, "%zu messages are more than there are groups: at most %u", n,
                       (unsigned)UINT32_MAX);
    const of_status status = of_check_network_link(link);
    if (status != OF_OK)
        return status;
    if (!of_is_time(processor))
        return of_fail(OF_INVALID,
                       "a message takes %g s of the processor: give a time that is neither "
                       "negative nor infinite",
                       processor);
    *m = (messages){.ready = ready, .bytes = bytes, .n = n, .link = *link, .processor = processor};
    return check_sums(m);
}

/* The groups that are made here: a message of `last` is the last one of its group. */
static void close_by_threshold(const messages *m, uint64_t threshold, bool *last) {
    uint64_t open = 0;
    for (size_t i = 0; i < m->n; i++) {
        open += m->bytes[i];
        last[i] = open >= threshold;
        if (last[i])
            open = 0;
    }
}

static void close_by_papers_rule(const messages *m, bool *last) {
    uint64_t open = 0;
    double link_is_free = 0, ready = 0;
    for (size_t i = 0; i + 1 < m->n; i++) {
        open += m->bytes[i];
        ready = of_later(ready, m->ready[i]);
        const double start = of_later(link_is_free, ready);
        last[i] = m->ready[i + 1] - start >= m->link.latency;
        if (last[i]) {
            link_is_free = start + seconds_of(m, open);
            open = 0;
            ready = 0;
        }
    }
}

/* The best grouping of the first messages: when it is through, and where its last group begins. */
typedef struct prefix {
    double finish;
    size_t first;
} prefix;

/* An earlier finish of those before a group never makes the group later, so the best of a prefix
 * is made of the best of a shorter one. late: by the messages before the last group. */
static void add_group(const messages *m, const prefix *before, double late, prefix *best) {
    double ready = late;
    for (size_t j = 1; j <= m->n; j++) {
        uint64_t bytes = 0;
        prefix found = {INFINITY, 0};
        ready = of_later(ready, m->ready[j - 1] + late);
        for (size_t i = j; i-- > 0;) {
            bytes += m->bytes[i];
            const double through = of_later(ready, before[i].finish) + seconds_of(m, bytes);
            if (through <= found.finish)
                found = (prefix){through, i};
        }
        best[j] = found;
    }
}

/* The last group begins after the processor has been busy with all others, and has the last
 * message. So more groups than these are never through before a single one. */
static size_t most_groups(const messages *m) {
    double bytes = 0;
    for (size_t i = 0; i + 1 < m->n; i++)
        bytes += (double)m->bytes[i];
    const double more = bytes * m->link.seconds_per_byte / m->processor;
    return more < (double)m->n ? (size_t)more + 1 : m->n;
}

/* best: most + 1 rows, of which row k is of k groups. Returns how many groups all messages have. */
static size_t find_counted(const messages *m, size_t most, prefix *best) {
    const size_t row = m->n + 1;
    size_t groups = 1;
    for (size_t j = 1; j <= m->n; j++)
        best[j].finish = INFINITY;
    for (size_t k = 1; k <= most; k++) {
        prefix *now = best + k * row;
        now->finish = INFINITY;
        add_group(m, now - row, (double)(k - 1) * m->processor, now);
        if (now[m->n].finish < best[groups * row + m->n].finish)
            groups = k;
    }
    return groups;
}

/* Where messages take nothing of the processor, their number does not matter: in the only row the
 * groups before the last one are found in the row itself. */
static of_status close_by_plan(const messages *m, bool *last) {
    const size_t row = m->n + 1, most = m->processor > 0 ? most_groups(m) : 0;
    prefix *best = calloc(most + 1, row * sizeof *best);
    if (!best)
        return of_fail(OF_NO_MEMORY, "out of memory for a plan of %zu messages", m->n);
    size_t groups = 0;
    if (most)
        groups = find_counted(m, most, best);
    else
        add_group(m, best, 0, best);
    for (size_t end = m->n; end > 0; end = best[groups * row + end].first, groups -= groups > 0)
        last[end - 1] = true;
    free(best);
    return OF_OK;
}

static of_status close_groups(of_fusion how, const messages *m, uint64_t threshold, bool *last) {
    switch (how) {
    case OF_FUSION_EACH:
        close_by_threshold(m, 0, last);
        break;
    case OF_FUSION_ALL:
        break;
    case OF_FUSION_THRESHOLD:
        close_by_threshold(m, threshold, last);
        break;
    case OF_FUSION_PAPER:
        close_by_papers_rule(m, last);
        break;
    case OF_FUSION_PLANNED:
        return close_by_plan(m, last);
    }
    return OF_OK;
}

static size_t number_groups(const bool *last, size_t n, uint32_t *group) {
    uint32_t number = 0;
    for (size_t i = 0; i < n; i++) {
        group[i] = number;
        number += last[i] && i + 1 < n;
    }
    return n ? (size_t)number + 1 : 0;
}

of_status of_fuse_messages(of_fusion how, const double *ready, const uint64_t *bytes, size_t n,
                           const of_network_link *link, double processor, uint64_t threshold_bytes,
                           uint32_t *group, size_t *n_groups) {
    messages m = {0};
    of_status status = check(&m, ready, bytes, n, link, processor, group, n_groups);
    if (status != OF_OK)
        return status;
    if ((unsigned)how > OF_FUSION_PLANNED)
        return of_fail(OF_INVALID, "there is no fusion %d of messages", (int)how);
    bool *last = calloc(n + 1, sizeof *last);
    if (!last)
        return of_fail(OF_NO_MEMORY, "out of memory for the groups of %zu messages", n);
    status = close_groups(how, &m, threshold_bytes, last);
    if (status == OF_OK)
        *n_groups = number_groups(last, n, group);
    free(last);
    return status;
}
