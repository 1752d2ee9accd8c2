/* SPDX-License-Identifier: BSD-3-Clause */
/* store_policy.c: the choice between stores as usual and past the caches. */
#include "store_policy.h"

#include <time.h>

/* How many launches it is to the next trial, in the mean: while the votes differ, and when they
 * agree. No fixed number: of a model with as many layers always the same one would be tried,
 * perhaps the first, whose weight backward does not read. */
enum { OFTEN = 8, RARELY = 64 };
enum { PART_BITS = 8, LOW_BITS = 32 - PART_BITS };
enum { MOST_VOTES = 3 };

/* The share of the time of usual stores. The rest makes up for what no trial sees: the next forward
 * pass reads the parameter from memory. */
static const double worth = 0.8;

void of_store_policy_init(of_store_policy *policy) {
    *policy = (of_store_policy){.random = UINT32_C(1) << 31};
}

/* From half of the mean to one and a half of it. */
static unsigned interval(const of_store_policy *policy, unsigned mean) {
    return mean / 2 + (mean * (policy->random >> LOW_BITS) >> PART_BITS);
}

bool of_store_policy_is_past(const of_store_policy *policy) {
    return policy->votes > 0;
}

bool of_store_policy_try(of_store_policy *policy) {
    const bool agreed = policy->votes == MOST_VOTES || policy->votes == -MOST_VOTES;
    if (++policy->launches < interval(policy, agreed ? RARELY : OFTEN))
        return false;
    policy->launches = 0;
    /* A linear congruence, of which the high bits are random (Knuth, The Art of Computer
     * Programming, volume 2, 3.3.4, table 1, line 16). */
    policy->random = policy->random * 1664525u + 1013904223u;
    policy->past_first = !policy->past_first;
    return true;
}

void of_store_policy_found(of_store_policy *policy, double past, double usual) {
    if (policy->past_first) {
        policy->past = past;
        policy->usual = usual;
    } else if (policy->past + past < worth * (policy->usual + usual)) {
        policy->votes += policy->votes < MOST_VOTES;
    } else {
        policy->votes -= policy->votes > -MOST_VOTES;
    }
}

static double seconds(of_store_fn *run, void *arg, int64_t begin, int64_t end, bool past_caches) {
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    run(arg, begin, end, past_caches);
    clock_gettime(CLOCK_MONOTONIC, &to);
    return (double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec);
}

void of_store_policy_run(of_store_policy *policy, int64_t n, of_store_fn *run, void *arg) {
    if (n < 2 || !of_store_policy_try(policy)) {
        run(arg, 0, n, of_store_policy_is_past(policy));
        return;
    }
    const bool past = policy->past_first;
    const int64_t half = n / 2;
    const double first = seconds(run, arg, 0, half, past);
    const double second = seconds(run, arg, half, 2 * half, !past);
    of_store_policy_found(policy, past ? first : second, past ? second : first);
    if (2 * half < n)
        run(arg, 2 * half, n, of_store_policy_is_past(policy));
}
