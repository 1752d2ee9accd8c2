/* SPDX-License-Identifier: BSD-3-Clause */
#ifndef OPTFUSE_TEST_PACKING_CHECK_H
#define OPTFUSE_TEST_PACKING_CHECK_H

#include <stdint.h>

/* The number of promises of of_cuda_pack() that are broken. Prints them. */
int check_packing(uint64_t seed);

#endif
