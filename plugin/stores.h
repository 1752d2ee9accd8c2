/* SPDX-License-Identifier: BSD-3-Clause */
/* stores.h: how the kernels of backward fusion store the parameter on a CPU, as usual or
 * past the caches (of_span.past_caches).
 *
 * All threads have just read it, so that a store as usual has to take its line from the
 * caches of others. Where that takes long, between chiplets or sockets, stores past the
 * caches are several times as fast. Where it does not they are slower, and the next forward
 * pass finds the parameter in memory instead of a cache. Which of the two holds is tried:
 * now and then one half of a large launch goes each way, and has a vote. */
#ifndef OPTFUSE_STORES_H
#define OPTFUSE_STORES_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct of_stores {
    int votes;         /* above 0: past the caches */
    unsigned launches; /* large ones, since the last trial */
    bool past_first;   /* in the last trial */
} of_stores;

void of_stores_init(of_stores *stores);

bool of_stores_are_past(const of_stores *stores);

/* Before a launch of so many elements on several threads: whether it is a trial. The order
 * of the two ways changes from one to the next, since what goes first starts the threads. */
bool of_stores_try(of_stores *stores, int64_t elements);

/* What the trial found: seconds of a half that went past the caches, and of the other one. */
void of_stores_vote(of_stores *stores, double past, double usual);

#ifdef __cplusplus
}
#endif

#endif
