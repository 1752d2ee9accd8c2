/* SPDX-License-Identifier: BSD-3-Clause */
/* stores.c: the choice between stores as usual and past the caches. */
#include "stores.h"

/* Halves of such a launch take long enough to be compared. */
enum { LEAST_ELEMENTS = 1 << 17 };

/* How many launches it is to the next trial: while the votes differ, and when they agree. */
enum { MOST_VOTES = 4, OFTEN = 8, RARELY = 64 };

/* Of the time of usual stores. The rest makes up for what no trial sees: the next forward
 * pass reads the parameter from memory. */
static const double worth = 0.8;

void of_stores_init(of_stores *stores) {
    *stores = (of_stores){.votes = 1};
}

bool of_stores_are_past(const of_stores *stores) {
    return stores->votes > 0;
}

bool of_stores_try(of_stores *stores, int64_t elements) {
    const bool agreed = stores->votes == MOST_VOTES || stores->votes == -MOST_VOTES;
    if (elements < LEAST_ELEMENTS || ++stores->launches < (agreed ? RARELY : OFTEN))
        return false;
    stores->launches = 0;
    stores->past_first = !stores->past_first;
    return true;
}

void of_stores_vote(of_stores *stores, double past, double usual) {
    if (past < worth * usual)
        stores->votes += stores->votes < MOST_VOTES;
    else
        stores->votes -= stores->votes > -MOST_VOTES;
}
