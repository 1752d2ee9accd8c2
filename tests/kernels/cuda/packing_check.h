/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef OPTFUSE_TEST_PACKING_CHECK_H
#define OPTFUSE_TEST_PACKING_CHECK_H

#include <stdint.h>

/* Of of_cuda_pack(): how many promises are broken. It prints them. */
int check_packing(uint64_t seed);

#endif
