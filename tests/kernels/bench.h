/* SPDX-License-Identifier: BSD-3-Clause */
/* bench.h: times one row of the kernel table. */
#ifndef OPTFUSE_TEST_BENCH_H
#define OPTFUSE_TEST_BENCH_H

#include "kernels.h"

/* So many bytes of a row's arrays fit the second-level cache, or no cache. */
enum { BENCH_CACHED_BYTES = 384 << 10, BENCH_LARGE_BYTES = 256 << 20 };

/* The options of a usual training script. */
void bench_usual_hyper(const of_rule *rule, double *hyper);

/* Seconds of the fastest of several runs over arrays of about total_bytes, which
 * hold *n elements each; a run moves *moved bytes. */
double bench_seconds(const of_kernel *row, size_t total_bytes, size_t *n, size_t *moved);

void bench_header(void);
/* Prints ns an element and GB/s, for arrays that fit the second-level cache
 * and for arrays much larger than any. */
void bench_row(const of_kernel *row, const char *name);

#endif
