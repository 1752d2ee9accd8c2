/* SPDX-License-Identifier: BSD-3-Clause */
/* launch_ranges.h: reads the table that a kernel is launched with: the memory that the kernel
 * reads and writes. */
#ifndef OPTFUSE_TEST_LAUNCH_RANGES_H
#define OPTFUSE_TEST_LAUNCH_RANGES_H

#include "cuda/table.h"
#include "gpu_update.h"

typedef struct launch_range {
    const void *address;
    size_t bytes;
    bool write;
} launch_range;

/* Those of one launch, with room for the fullest table. */
typedef struct launch_ranges {
    size_t n;
    launch_range at[OF_CUDA_WORDS(OF_CUDA_LARGE_BYTES) + 8];
} launch_ranges;

/* False: the kernel is unknown. */
bool launch_ranges_read(launch_ranges *r, const char *kernel, const void *table);

#endif
