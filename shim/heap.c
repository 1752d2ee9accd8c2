/* SPDX-License-Identifier: BSD-3-Clause */
/* heap.c: backward fusion frees each gradient while others are still to be made.
 * glibc's malloc may give that memory, at the end of its heap, back to the system and
 * have to take it again, page fault by page fault, in each backward. But from a large
 * block that is freed it learns that blocks of its size come and go, and then keeps
 * twice as much: mallopt(3), M_MMAP_THRESHOLD. So it is shown the largest block it
 * learns from, which is never touched. Where the user has set such options it learns
 * nothing, and other allocators have other ways. */
#include "heap.h"

#include <stdlib.h>

enum { LARGEST = 32 << 20, ITS_OWN = 64 << 10 };

void of_keep_heap(void) {
    void *volatile block = malloc(LARGEST - ITS_OWN); /* else the compiler leaves both out */
    free(block);
}
