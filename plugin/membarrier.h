/* SPDX-License-Identifier: BSD-3-Clause */
/* membarrier.h: one thread's fence for all threads of a process (membarrier(2)). */
#ifndef OPTFUSE_MEMBARRIER_H
#define OPTFUSE_MEMBARRIER_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Has every thread of the process pass a full fence, this one, too; false: the system refuses. */
bool of_fence_all(void);

#ifdef __cplusplus
}
#endif
#endif
