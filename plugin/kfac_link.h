/* SPDX-License-Identifier: BSD-3-Clause */
/* kfac_link.h: what the files of kfac_plan.h share: links, and seconds. */
#ifndef OPTFUSE_KFAC_LINK_H
#define OPTFUSE_KFAC_LINK_H

#include <float.h>

#include "kfac_plan.h"

static inline bool of_is_time(double seconds) {
    return seconds >= 0 && seconds <= DBL_MAX;
}

static inline double of_later(double a, double b) {
    return a > b ? a : b;
}

static inline double of_seconds_over(const of_link *link, uint64_t bytes) {
    return link->latency + (double)bytes * link->seconds_per_byte;
}

/* OF_INVALID: no link, or a number of it is negative or not finite. */
of_status of_check_link(const of_link *link);

#endif
