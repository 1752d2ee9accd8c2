/* SPDX-License-Identifier: BSD-3-Clause */
/* heap.h: memory that gradients come and go in. */
#ifndef OPTFUSE_HEAP_H
#define OPTFUSE_HEAP_H

#ifdef __cplusplus
extern "C" {
#endif

/* Lets the process keep it: up to 64 MiB at the end of the heap. When the optimizer's
 * state exists: were it made after this, it would lie between the gradients, and their
 * memory could not be used again. */
void of_keep_heap(void);

#ifdef __cplusplus
}
#endif
#endif
