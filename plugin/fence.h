/* SPDX-License-Identifier: BSD-3-Clause */
/* fence.h: the order between memory that was written, and its seal and its mark that go then.
 *
 * The host's mark goes by a plain store, and code that is not ours reads it by a plain load:
 * PyTorch's dispatcher, which asks for no order. A thread that finds no mark then reads the
 * numbers, and where memory order is weak it may find old ones. So whoever has written what a mark
 * guards has every other thread of the process pass a fence before the mark goes (membarrier(2)).
 *
 * A seal, by which a use fails that comes past the mark, is read by a plain load, too. Who finds no
 * mark must find no seal; and an alias that another thread made while step() looked for some has no
 * mark, so that who finds no seal must find new numbers. So there is a fence before seals go, and
 * another one before marks do.
 *
 * Where the system refuses that, marks stay: whoever meets one asks the registry, whose locks and
 * counts order all three. An alias made during step() is not ordered then. An update that runs
 * operators lifts its seals before it writes, so such aliases of it are ordered on no processor. */
#ifndef OPTFUSE_FENCE_H
#define OPTFUSE_FENCE_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* x86 keeps the order of stores and that of loads: nothing of this is in the binary there. */
#if defined(__x86_64__) || defined(__i386__)
enum { OF_ORDER_IS_WEAK = 0 };
#else
enum { OF_ORDER_IS_WEAK = 1 };
#endif

void of_fence_or_keep_marks(void);
bool of_has_no_fence(void);

/* Between the last write and the first seal that goes, and between the last seal and the first
 * mark, by the thread that wrote or one that has synchronized with it. */
static inline void of_order_marks(void) {
    if (OF_ORDER_IS_WEAK)
        of_fence_or_keep_marks();
}

/* Whether a mark behind which nothing is pending has to stay. */
static inline bool of_marks_stay(void) {
    return OF_ORDER_IS_WEAK && of_has_no_fence();
}

#ifdef __cplusplus
}
#endif
#endif
