/* SPDX-License-Identifier: BSD-3-Clause */
/* stores.c: the choice between stores as usual and past the caches. */
#include "stores.h"

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
