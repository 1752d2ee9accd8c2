/* SPDX-License-Identifier: BSD-3-Clause */
/* shared_weights.c: what it costs to update weights that every thread has just read,
 * as in backward, where each needs all weights of a layer for the gradient of its
 * inputs. The OpenMP runtime is the one that PyTorch has loaded (floor.c). */
#include <omp.h>

#include "bench.h"

#define EXPORT __attribute__((visibility("default")))

enum { ARRAYS = 4 }; /* weights, gradient, two moments */

typedef struct layer {
    float *at[ARRAYS];
    size_t n;
} layer;

static volatile float sink;

/* All weights by all threads; of the gradient each writes what it will read. */
static void like_backward(const layer *of, bool read, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const size_t parts = (size_t)omp_get_num_threads(), part = (size_t)omp_get_thread_num();
        float sum = 0;
        for (size_t i = 0; read && i < of->n; i += 16)
            sum += of->at[0][i];
        sink = sum;
        for (size_t i = of->n * part / parts; i < of->n * (part + 1) / parts; i++)
            of->at[1][i] = 1e-3f;
    }
}

static double update_ms(const of_kernel *row, const void *scalars, const layer *of,
                        bool past_caches, int threads) {
    const double begin = omp_get_wtime();
#pragma omp parallel num_threads(threads)
    {
        const size_t parts = (size_t)omp_get_num_threads(), part = (size_t)omp_get_thread_num();
        const size_t lines = of->n / 16, from = lines * part / parts * 16;
        const of_span span = {.param = of->at[0] + from,
                              .grad = of->at[1] + from,
                              .state = {of->at[2] + from, of->at[3] + from},
                              .n = lines * (part + 1) / parts * 16 - from,
                              .past_caches = past_caches};
        row->run(&span, scalars);
    }
    return 1e3 * (omp_get_wtime() - begin);
}

/* ms that AdamW's updates of n_layers take together. arrays: ARRAYS of each layer, of
 * `elements` floats (a multiple of 16) and aligned to 64 bytes. 0: no such kernel. */
EXPORT double shared_weights_ms(float *const *arrays, size_t n_layers, size_t elements, bool read,
                                bool past_caches, int threads);
double shared_weights_ms(float *const *arrays, size_t n_layers, size_t elements, bool read,
                         bool past_caches, int threads) {
    const of_kernel *row =
        of_kernel_find("adam", OF_REF_CPU_FUSED, OF_FLOAT32, OF_CPU, of_isa_detect());
    const of_rule *rule = of_rule_find("adam");
    double hyper[OF_MAX_HYPER], scalars[OF_MAX_SCALARS / sizeof(double)], ms = 0;
    if (!row)
        return 0;
    bench_usual_hyper(rule, hyper);
    rule->prepare(hyper, &(of_count){.step = 100.0}, scalars);
    for (size_t i = 0; i < n_layers; i++) {
        layer one = {.n = elements};
        for (int k = 0; k < ARRAYS; k++)
            one.at[k] = arrays[i * ARRAYS + (size_t)k];
        like_backward(&one, read, threads);
        ms += update_ms(row, scalars, &one, past_caches, threads);
    }
    return ms;
}
