/* SPDX-License-Identifier: BSD-3-Clause */
/* stores.c: the choice between stores as usual and past the caches. */
#include "stores.h"

#include <time.h>

/* How many launches it is to the next trial: while the votes differ, and when they agree. */
enum { OFTEN = 8, RARELY = 64 };
enum { MOST_VOTES = 3 };

/* Of the time of usual stores. The rest makes up for what no trial sees: the next forward
 * pass reads the parameter from memory. */
static const double worth = 0.8;

void of_stores_init(of_stores *stores) {
    *stores = (of_stores){0};
}

bool of_stores_are_past(const of_stores *stores) {
    return stores->votes > 0;
}

bool of_stores_try(of_stores *stores) {
    const bool agreed = stores->votes == MOST_VOTES || stores->votes == -MOST_VOTES;
    if (++stores->launches < (agreed ? RARELY : OFTEN))
        return false;
    stores->launches = 0;
    stores->past_first = !stores->past_first;
    return true;
}

void of_stores_found(of_stores *stores, double past, double usual) {
    if (stores->past_first) {
        stores->past = past;
        stores->usual = usual;
    } else if (stores->past + past < worth * (stores->usual + usual)) {
        stores->votes += stores->votes < MOST_VOTES;
    } else {
        stores->votes -= stores->votes > -MOST_VOTES;
    }
}

static double seconds(of_stores_fn *run, void *arg, int64_t begin, int64_t end, bool past_caches) {
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    run(arg, begin, end, past_caches);
    clock_gettime(CLOCK_MONOTONIC, &to);
    return (double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec);
}

void of_stores_run(of_stores *stores, int64_t n, of_stores_fn *run, void *arg) {
    if (!of_stores_try(stores)) {
        run(arg, 0, n, of_stores_are_past(stores));
        return;
    }
    const bool past = stores->past_first;
    const double first = seconds(run, arg, 0, n / 2, past);
    const double second = seconds(run, arg, n / 2, n, !past);
    of_stores_found(stores, past ? first : second, past ? second : first);
}
