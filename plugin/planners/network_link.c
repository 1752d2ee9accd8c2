/* SPDX-License-Identifier: BSD-3-Clause */
/* network_link.c: the link that measured messages went over. */
#include "planners/network_link.h"

#include "fail.h"

of_status of_check_network_link(const of_network_link *link) {
    if (!link)
        return of_fail(OF_INVALID, "messages need a link that they are sent over");
    if (!of_is_time(link->latency) || !of_is_time(link->seconds_per_byte))
        return of_fail(OF_INVALID,
                       "a link of %g s a message and %g s a byte: neither may be negative or "
                       "infinite",
                       link->latency, link->seconds_per_byte);
    return OF_OK;
}

/* Sums over the measured messages. Those around the means are not differences of sums around
 * zero, in which the latency would be lost: numbers of bytes are large. */
typedef struct moments {
    double bytes, seconds;     /* means */
    double variance, together; /* around the means: bytes^2, bytes * seconds */
    double squares, products;  /* around zero: the same */
} moments;

static moments moments_of(const uint64_t *bytes, const double *seconds, size_t n) {
    moments m = {0};
    for (size_t i = 0; i < n; i++) {
        m.bytes += (double)bytes[i] / (double)n;
        m.seconds += seconds[i] / (double)n;
    }
    for (size_t i = 0; i < n; i++) {
        const double x = (double)bytes[i];
        m.variance += (x - m.bytes) * (x - m.bytes);
        m.together += (x - m.bytes) * (seconds[i] - m.seconds);
        m.squares += x * x;
        m.products += x * seconds[i];
    }
    return m;
}

static of_status check_measured(const uint64_t *bytes, const double *seconds, size_t n,
                                const of_network_link *out) {
    if (!out || (n && (!bytes || !seconds)))
        return of_fail(OF_INVALID, "a link needs bytes and seconds of messages and an output");
    bool differ = false;
    for (size_t i = 0; i < n; i++) {
        if (!of_is_time(seconds[i]))
            return of_fail(OF_INVALID,
                           "message %zu took %g s: a time is neither negative nor infinite", i,
                           seconds[i]);
        differ = differ || bytes[i] != bytes[0];
    }
    if (!differ)
        return of_fail(OF_INVALID,
                       "%zu messages of one size do not tell the latency from the seconds a byte: "
                       "measure messages of two sizes at least",
                       n);
    return OF_OK;
}

/* Where a number of the best link of all is negative, the best allowed link has 0 there. */
of_status of_fit_network_link(const uint64_t *bytes, const double *seconds, size_t n,
                              of_network_link *out) {
    const of_status status = check_measured(bytes, seconds, n, out);
    if (status != OF_OK)
        return status;
    const moments m = moments_of(bytes, seconds, n);
    if (!of_is_time(m.products))
        return of_fail(OF_INVALID, "the seconds of %zu messages are out of range: check them", n);
    of_network_link link = {.seconds_per_byte = of_later(m.together / m.variance, 0)};
    link.latency = m.seconds - link.seconds_per_byte * m.bytes;
    if (link.latency < 0)
        link = (of_network_link){.seconds_per_byte = m.products / m.squares};
    *out = link;
    return OF_OK;
}
