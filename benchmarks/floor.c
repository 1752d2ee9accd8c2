/* SPDX-License-Identifier: BSD-3-Clause */
/* floor.c: the least time in which memory can be updated.
 *
 * A pass reads and writes the same arrays as an optimizer's update, in the same
 * order and on the same threads, and does nothing with them but one exclusive
 * or: no update of as many bytes can be faster. The OpenMP runtime is the one
 * that PyTorch has loaded; nothing is linked (benchmarks/meson.build). */
#include <omp.h>
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

/* A cache line. The arrays hold whole ones. */
typedef unsigned line __attribute__((vector_size(64), aligned(4), may_alias));

static inline __attribute__((always_inline)) void lines(const line *gradient, line *const *written,
                                                        const size_t n_written, size_t begin,
                                                        size_t end) {
    const line one = {1};
    line *const first = written[0], *const second = written[n_written > 1 ? 1 : 0],
                *const third = written[n_written > 2 ? 2 : 0]; /* none is read again in the loop */
    for (size_t i = begin; i < end; i++) {
        const line x = gradient ? gradient[i] : one;
        first[i] ^= x;
        if (n_written > 1)
            second[i] ^= x;
        if (n_written > 2)
            third[i] ^= x;
    }
}

/* The best vectors this CPU has, as in the kernels; n_written is a constant in
 * each call, so that the inner loop is gone. */
__attribute__((target_clones("avx512f", "avx2", "default"))) static void
some_lines(const line *gradient, line *const *written, size_t n_written, size_t begin, size_t end) {
    if (n_written == 1 && gradient)
        lines(gradient, written, 1, begin, end);
    else if (n_written == 2 && gradient)
        lines(gradient, written, 2, begin, end);
    else if (n_written == 3 && gradient)
        lines(gradient, written, 3, begin, end);
    else if (n_written == 1)
        lines(NULL, written, 1, begin, end);
    else if (n_written == 2)
        lines(NULL, written, 2, begin, end);
    else if (n_written == 3)
        lines(NULL, written, 3, begin, end);
}

/* Passes over n_lines of the gradient and of 1 to 3 arrays that are written.
 * gradient NULL: it is in the cache, and reading it costs nothing. Each thread
 * takes one consecutive part, as in at::parallel_for. */
EXPORT void floor_pass(const void *gradient, void *const *written, size_t n_written, size_t n_lines,
                       int threads, int passes);
void floor_pass(const void *gradient, void *const *written, size_t n_written, size_t n_lines,
                int threads, int passes) {
    line *arrays[3] = {NULL};
    for (size_t k = 0; k < n_written && k < 3; k++)
        arrays[k] = written[k];
#pragma omp parallel num_threads(threads)
    {
        const size_t parts = (size_t)omp_get_num_threads(), part = (size_t)omp_get_thread_num();
        const size_t begin = n_lines * part / parts, end = n_lines * (part + 1) / parts;
        for (int i = 0; i < passes; i++)
            some_lines(gradient, arrays, n_written, begin, end);
    }
}
