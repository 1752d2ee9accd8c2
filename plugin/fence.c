/* SPDX-License-Identifier: BSD-3-Clause */
/* fence.c: see fence.h. */
#include "fence.h"

#include "internal.h"

#ifdef __linux__
#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

static bool ask(int command) {
    return syscall(SYS_membarrier, command, 0) == 0;
}

/* A process registers once, which a program that it starts does not inherit. */
bool of_fence_all(void) {
    return ask(MEMBARRIER_CMD_PRIVATE_EXPEDITED) ||
           (ask(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) &&
            ask(MEMBARRIER_CMD_PRIVATE_EXPEDITED));
}
#else
bool of_fence_all(void) {
    return false;
}
#endif

static atomic_bool marks_stay;

void of_fence_or_keep_marks(void) {
    of_order_or_keep(&marks_stay);
}

bool of_has_no_fence(void) {
    return of_are_kept(&marks_stay);
}
