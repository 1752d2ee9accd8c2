/* SPDX-License-Identifier: BSD-3-Clause */
/* store_policy.h: how the kernels of backward fusion store the parameter on a CPU, as usual or
 * past the caches (of_span.past_caches).
 *
 * All threads have just read it, so that a store as usual has to take its line from the
 * caches of others. Where that takes long, between chiplets or sockets, stores past the
 * caches are several times as fast. Where it does not they are slower, and the next forward
 * pass finds the parameter in memory instead of a cache. Which of the two holds is tried:
 * now and then one half of a launch goes each way. Two such trials have a vote together, in
 * which each way went first once, since what goes first starts the threads. */
#ifndef OPTFUSE_STORE_POLICY_H
#define OPTFUSE_STORE_POLICY_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct of_store_policy {
    int votes;          /* above 0: past the caches */
    unsigned launches;  /* on several threads, since the last trial */
    uint32_t random;    /* its high bits: how soon the next trial is */
    bool past_first;    /* in the last trial */
    double past, usual; /* seconds, of the first of two trials */
} of_store_policy;

void of_store_policy_init(of_store_policy *policy); /* as usual, until a vote */

bool of_store_policy_is_past(const of_store_policy *policy);

/* Runs items [begin, end) on several threads and stores so. */
typedef void of_store_fn(void *arg, int64_t begin, int64_t end, bool past_caches);

/* A launch of n items on several threads: run(arg, 0, n), or the two halves of a trial and, of an
 * odd number, the last item. */
void of_store_policy_run(of_store_policy *policy, int64_t n, of_store_fn *run, void *arg);

/* The two halves of of_store_policy_run(). Whether the next launch is a trial, in which
 * `past_first` says how the first half is stored; */
bool of_store_policy_try(of_store_policy *policy);
/* and what it found: seconds of the half that went past the caches, and of the other. */
void of_store_policy_found(of_store_policy *policy, double past, double usual);

#ifdef __cplusplus
}
#endif

#endif
