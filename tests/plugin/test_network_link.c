/* SPDX-License-Identifier: BSD-3-Clause */
/* The link that measured messages went over. */
#include "planners/network_link.h"

#include <math.h>
#include <string.h>

#include "fixture.h"
#include "random_work.h"

enum { MANY = 4000 };

static double squared_error(const uint64_t *bytes, const double *seconds, size_t n,
                            of_network_link link) {
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        const double error = link.latency + link.seconds_per_byte * (double)bytes[i] - seconds[i];
        sum += error * error;
    }
    return sum;
}

TEST(a_link_is_found_by_the_messages_that_went_over_it) {
    static const uint64_t bytes[] = {4, 4096, 1 << 20, 64 << 20, 1 << 30};
    double seconds[5];
    for (size_t i = 0; i < 5; i++)
        seconds[i] = 9.29e-4 + 3.58375e-10 * (double)bytes[i];
    of_network_link link;
    OK(of_fit_network_link(bytes, seconds, 5, &link));
    ck_assert_double_eq_tol(link.latency, 9.29e-4, 1e-15);
    ck_assert_double_eq_tol(link.seconds_per_byte, 3.58375e-10, 1e-22);
}

TEST(no_link_that_is_allowed_fits_better) {
    int at_border[2] = {0};
    for (int round = 0; round < MANY; round++) {
        uint64_t bytes[6];
        double seconds[6];
        const size_t n = 2 + random_below(5);
        for (size_t i = 0; i < n; i++) {
            bytes[i] = i + random_below(8);
            seconds[i] = (double)random_below(6) * (random_below(2) ? (double)bytes[i] : 1);
        }
        of_network_link best;
        if (bytes[0] == bytes[1]) /* of two at least two sizes */
            bytes[1]++;
        OK(of_fit_network_link(bytes, seconds, n, &best));
        const double least = squared_error(bytes, seconds, n, best);
        ck_assert(best.latency >= 0 && best.seconds_per_byte >= 0);
        at_border[0] += best.latency == 0;
        at_border[1] += best.seconds_per_byte == 0;
        for (int step = 0; step < 9; step++) {
            const of_network_link other = {
                .latency = fmax(0, best.latency + 1e-3 * (step % 3 - 1)),
                .seconds_per_byte = fmax(0, best.seconds_per_byte + 1e-3 * (step / 3 % 3 - 1))};
            ck_assert_double_ge(squared_error(bytes, seconds, n, other), least - 1e-9);
        }
    }
    ck_assert(at_border[0] >= MANY / 50 && at_border[1] >= MANY / 50);
}

TEST(a_link_of_bad_measurements_is_refused) {
    of_network_link out = {.latency = 71, .seconds_per_byte = 72};
    const uint64_t bytes[] = {5, 5, 6};
    double seconds[] = {1, 2, 3};
    INVALID(of_fit_network_link(bytes, seconds, 2, &out), "2 messages of one size");
    INVALID(of_fit_network_link(bytes, seconds, 1, &out), "");
    INVALID(of_fit_network_link(NULL, NULL, 0, &out), "");
    INVALID(of_fit_network_link(NULL, seconds, 3, &out), "");
    INVALID(of_fit_network_link(bytes, NULL, 3, &out), "");
    INVALID(of_fit_network_link(bytes, seconds, 3, NULL), "");
    static const double bad[] = {-1, NAN, INFINITY, -INFINITY};
    for (size_t i = 0; i < 4; i++) {
        seconds[2] = bad[i];
        INVALID(of_fit_network_link(bytes, seconds, 3, &out), "message 2 took");
    }
    seconds[0] = seconds[1] = seconds[2] = 1e308;
    INVALID(of_fit_network_link(bytes, seconds, 3, &out), "out of range");
    ck_assert(out.latency == 71 && out.seconds_per_byte == 72);
}
