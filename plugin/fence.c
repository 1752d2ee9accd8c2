/* SPDX-License-Identifier: BSD-3-Clause */
/* fence.c: see fence.h. */
#include "fence.h"

#include "lock_free.h"

static atomic_bool marks_stay;

void of_fence_or_keep_marks(void) {
    of_order_or_keep(&marks_stay);
}

bool of_has_no_fence(void) {
    return of_are_kept(&marks_stay);
}
