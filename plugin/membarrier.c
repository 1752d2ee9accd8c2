/* SPDX-License-Identifier: BSD-3-Clause */
/* membarrier.c: see membarrier.h. */
#include "membarrier.h"

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
