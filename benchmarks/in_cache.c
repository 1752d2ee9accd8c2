/* SPDX-License-Identifier: BSD-3-Clause */
/* in_cache.c: the kernels on data in the second-level cache of one core, and how
 * fast that core divides and takes square roots: the two operations that it can't
 * begin before the one ahead is nearly done. */
#define _DEFAULT_SOURCE
#include <math.h>
#include <string.h>
#include <time.h>

#include "bench.h"

#define EXPORT __attribute__((visibility("default")))
#define BEST_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))

enum { NUMBERS = 1024, REPEATS = 64, TRIES = 200 }; /* in the first-level cache */

#define OPERATIONS(type, root)                                                                     \
    BEST_VECTORS static void divide_##type(void *to, const void *from) {                           \
        type *restrict x = to;                                                                     \
        const type *restrict y = from;                                                             \
        for (int i = 0; i < NUMBERS; i++)                                                          \
            x[i] = y[i] / x[i];                                                                    \
    }                                                                                              \
    BEST_VECTORS static void root_##type(void *to, const void *from) {                             \
        type *restrict x = to;                                                                     \
        const type *restrict y = from;                                                             \
        for (int i = 0; i < NUMBERS; i++)                                                          \
            x[i] = root(y[i]);                                                                     \
    }
OPERATIONS(float, sqrtf)
OPERATIONS(double, sqrt)

typedef void operation(void *to, const void *from);

static double now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

/* ns of one number, in the fastest of several tries. */
static double fastest(operation *run, bool is_double) {
    static double x[NUMBERS], y[NUMBERS];
    for (int i = 0; i < NUMBERS; i++) {
        if (is_double) {
            x[i] = 1.25, y[i] = 2.75;
        } else {
            memcpy((float *)(void *)x + i, &(float){1.25f}, sizeof(float));
            memcpy((float *)(void *)y + i, &(float){2.75f}, sizeof(float));
        }
    }
    double best = INFINITY;
    for (int i = 0; i < TRIES; i++) {
        const double begin = now_ns();
        for (int k = 0; k < REPEATS; k++)
            run(x, y);
        best = fmin(best, now_ns() - begin);
    }
    return best / (NUMBERS * REPEATS);
}

/* ns of one division or square root in the type of a rule's computation. */
EXPORT double in_cache_division(int dtype);
double in_cache_division(int dtype) {
    return dtype == OF_FLOAT64 ? fastest(divide_double, true) : fastest(divide_float, false);
}

EXPORT double in_cache_root(int dtype);
double in_cache_root(int dtype) {
    return dtype == OF_FLOAT64 ? fastest(root_double, true) : fastest(root_float, false);
}

/* ns an element of this CPU's kernel for the rule; *n: the elements of each of
 * its arrays. 0 if there is none. */
EXPORT double in_cache_update(const char *rule, int dtype, size_t *n);
double in_cache_update(const char *rule, int dtype, size_t *n) {
    const of_isa best = of_isa_detect();
    const of_kernel *row = of_kernel_find(rule, OF_REF_CPU_FUSED, (of_dtype)dtype, OF_CPU, best);
    size_t moved;
    return row ? 1e9 * bench_seconds(row, BENCH_CACHED_BYTES, n, &moved) / (double)*n : 0;
}
