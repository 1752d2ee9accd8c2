/* SPDX-License-Identifier: BSD-3-Clause */
/* messages.h: plans of a distributed K-FAC (SPD-KFAC, arXiv 2107.06533): which factors are
 * reduced in one message, and which process inverts which of them.
 *
 * Factors are summed over processes while the forward and the backward pass run, so each is
 * ready at a time of its own. Every message has a latency, so neighbours are *fused* into groups
 * of one message each; a group can't be sent before its last member is ready.
 *
 * The functions keep nothing, and any thread may call them. Their errors are those of
 * optfuse.h: on anything but OF_OK of_error_message() says what to do, and no output has been
 * written. Arrays of n elements may be NULL for n = 0. */
#ifndef OPTFUSE_PLANNERS_KFAC_MESSAGES_H
#define OPTFUSE_PLANNERS_KFAC_MESSAGES_H

#include "optfuse.h"
#include "planners/network_link.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum of_fusion {
    OF_FUSION_EACH,      /* a message for each factor */
    OF_FUSION_ALL,       /* one message */
    OF_FUSION_THRESHOLD, /* a group is closed by the factor with which it reaches the bytes */
    OF_FUSION_PAPER,     /* the paper's rule: the next factor joins the open group if it is ready
                            before the group could start (the link free, all members ready), or
                            less than a latency after that. Not optimal */
    OF_FUSION_PLANNED    /* the last group is through as early as it can be */
} of_fusion;

/* Groups n messages. They are sent in their order: message i is ready at ready[i] seconds (from
 * any moment before all of them; the times need not ascend) and has bytes[i]. Each group takes
 * `processor` seconds from the passes, so that what is ready after it is ready later by as much.
 *
 * group: the number of each message's group, from 0, ascending; *n_groups: how many.
 * threshold_bytes: of THRESHOLD; with 0 each message is a group.
 *
 * PLANNED is exact. Let R[j] be when the first j messages are ready, and a, b and c the latency,
 * the seconds a byte and those of the processor. In k groups the first j messages are through at
 *     f[0][0] = 0
 *     f[k][j] = min over i < j of max(R[j] + (k - 1) c, f[k - 1][i]) + a + b bytes(i .. j - 1)
 * The plan has the fewest groups k of those with the least f[k][n]: no grouping is through earlier,
 * and none of so many groups up to the end of one of them. Among equals the last group is as large
 * as it can be, then the one before it, and so on. With c = 0 their number does not matter, and
 * each group is through as early as any grouping can be up to there: fewer groups may finish as
 * early, but use up time to spare for passes that are longer. Takes O(K n^2) time and O(K n)
 * memory; K = 1 if c = 0, else min(n, 1 + b bytes(0 .. n - 2) / c). OF_INVALID: an unknown fusion,
 * a time that is negative or not finite, or sums of bytes or seconds that are out of range.
 * OF_NO_MEMORY. */
OF_API of_status of_fuse_messages(of_fusion how, const double *ready, const uint64_t *bytes,
                                  size_t n, const of_network_link *link, double processor,
                                  uint64_t threshold_bytes, uint32_t *group, size_t *n_groups);

typedef enum of_placement {
    OF_PLACEMENT_BALANCED,    /* the largest factor first, each on the least loaded process */
    OF_PLACEMENT_ROUND_ROBIN, /* in their order, each on the next process */
    OF_PLACEMENT_EVERYWHERE   /* every process inverts all */
} of_placement;

/* An inverse that every process computes for itself, so that nobody has to send it. */
#define OF_EVERY_PROCESS (-1)

/* Places the inverses of n factors; factor i is sizes[i] x sizes[i]. One smaller than
 * everywhere_below is inverted by every process; it takes no turn of ROUND_ROBIN.
 *
 * owner: of each factor, a process from 0 or OF_EVERY_PROCESS. load: of each process, the sum of
 * size^3 of all that it inverts; or NULL. Of equal sizes the one with the lower index comes
 * first, and of equally loaded processes the one with the lower number.
 * OF_INVALID: an unknown placement, no process or more than an int32_t counts, or more factors
 * than a uint32_t counts.
 * OF_NO_MEMORY. */
OF_API of_status of_place_inverses(of_placement how, const uint32_t *sizes, size_t n,
                                   size_t processes, uint32_t everywhere_below, int32_t *owner,
                                   double *load);

#ifdef __cplusplus
}
#endif

#endif
