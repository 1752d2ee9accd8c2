/* SPDX-License-Identifier: BSD-3-Clause */
/* heap.h: keeps glibc's heap from being given back to the system when gradients are freed in
 * backward. */
#ifndef OPTFUSE_HEAP_H
#define OPTFUSE_HEAP_H

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Lets the process keep it, until as many have left. To be called when the optimizer's
 * state exists: were it made after this, it would lie between the gradients, and their
 * memory could not be used again. */
void of_heap_use(void);
void of_heap_leave(void);
/* At the first gradient of each backward pass of those who use it. It helps the heap of
 * the process, which is that of the thread that began it. */
void of_heap_begin_backward(void);
/* From here on malloc gives no memory of its main heap back to the system, whatever the size of a
 * block. It can't be undone. False: malloc refuses, or is not glibc's. */
bool of_heap_keep(void);

#ifdef __cplusplus
}
#endif
#endif
