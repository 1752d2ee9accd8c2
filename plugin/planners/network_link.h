/* SPDX-License-Identifier: BSD-3-Clause */
/* network_link.h: what carries messages between processes, by a model: one after the other, each
 * takes latency + bytes * seconds_per_byte. */
#ifndef OPTFUSE_PLANNERS_NETWORK_LINK_H
#define OPTFUSE_PLANNERS_NETWORK_LINK_H

#include <float.h>

#include "optfuse.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Neither is negative or infinite. */
typedef struct of_network_link {
    double latency; /* seconds a message */
    double seconds_per_byte;
} of_network_link;

/* The link that fits n measured messages best: the least sum of squared errors in seconds, among
 * links whose two numbers are not negative. OF_INVALID: all messages have the same size, so that
 * the two can't be told apart, or a time is negative or not finite. */
OF_API of_status of_fit_network_link(const uint64_t *bytes, const double *seconds, size_t n,
                                     of_network_link *out);

/* OF_INVALID: no link, or a number of it is negative or not finite. */
of_status of_check_network_link(const of_network_link *link);

static inline bool of_is_time(double seconds) {
    return seconds >= 0 && seconds <= DBL_MAX;
}

static inline double of_later(double a, double b) {
    return a > b ? a : b;
}

static inline double of_seconds_over(const of_network_link *link, uint64_t bytes) {
    return link->latency + (double)bytes * link->seconds_per_byte;
}

#ifdef __cplusplus
}
#endif

#endif
