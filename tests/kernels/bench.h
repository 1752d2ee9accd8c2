/* SPDX-License-Identifier: BSD-3-Clause */
/* bench.h: times one row of the kernel table. */
#ifndef OPTFUSE_TEST_BENCH_H
#define OPTFUSE_TEST_BENCH_H

#include "kernels.h"

void bench_header(void);
/* Prints ns an element and GB/s, for arrays that fit the second-level cache
 * and for arrays much larger than any. */
void bench_row(const of_kernel *row, const char *name);

#endif
