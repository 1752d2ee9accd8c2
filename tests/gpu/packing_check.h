/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef OPTFUSE_TEST_GPU_PACKING_CHECK_H
#define OPTFUSE_TEST_GPU_PACKING_CHECK_H

#include <stdint.h>

/* How many of twice so many rounds differ. */
int check_packing(uint64_t seed, int rounds);

#endif
