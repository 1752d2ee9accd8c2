/* SPDX-License-Identifier: BSD-3-Clause */
#define _DEFAULT_SOURCE
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void bench_usual_hyper(const of_rule *rule, double *hyper) {
    static const struct {
        const char *name;
        double value;
    } usual[] = {{"lr", 1e-3},
                 {"beta1", 0.9},
                 {"beta2", 0.999},
                 {"beta3", 0.99},
                 {"eps", 1e-8},
                 {"weight_decay", 0.01},
                 {"decoupled", 1.0},
                 {"momentum", 0.9},
                 {"alpha", 0.99},
                 {"rho", 0.9},
                 {"momentum_decay", 4e-3},
                 {"etaminus", 0.5},
                 {"etaplus", 1.2},
                 {"step_size_min", 1e-6},
                 {"step_size_max", 50.0},
                 {"lambd", 1e-4},
                 {"t0", 1e6},
                 {"stochastic_rounding", 1.0},
                 {"stochastic_state", 1.0}};
    for (size_t i = 0; i < rule->n_hyper; i++) {
        hyper[i] = 0.0;
        for (size_t k = 0; k < sizeof usual / sizeof *usual; k++)
            if (strcmp(rule->hyper[i], usual[k].name) == 0)
                hyper[i] = usual[k].value;
    }
}

static unsigned count_bits(unsigned bits) {
    unsigned n = 0;
    for (; bits; bits &= bits - 1)
        n++;
    return n;
}

/* Arrays of n elements in one block, a page apart from multiples of 4096 so
 * that they do not fall on each other in the cache. */
static of_span carve(unsigned char *block, size_t bytes, unsigned used, size_t n) {
    const size_t stride = bytes + 4096 + 256;
    of_span span = {.param = block, .grad = block + stride, .n = n};
    unsigned char *next = block + 2 * stride;
    for (unsigned i = 0; i < OF_MAX_STATE; i++) {
        if (used & (1u << i)) {
            span.state[i] = next;
            next += stride;
        }
    }
    return span;
}

double bench_seconds(const of_kernel *row, size_t total_bytes, size_t *n, size_t *moved) {
    const of_rule *rule = of_rule_find(row->rule);
    double hyper[OF_MAX_HYPER], scalars[OF_MAX_SCALARS / sizeof(double)];
    bench_usual_hyper(rule, hyper);
    of_count count = {.step = 100.0, .counters = {0.9, 0.01}};
    (row->reference == OF_REF_CUDA_OP_BY_OP ? rule->prepare_gpu : rule->prepare)(hyper, &count,
                                                                              scalars);

    const unsigned used = rule->state_used(hyper), states = count_bits(used);
    const size_t size = of_dtype_size(row->dtype);
    *n = total_bytes / size / (2 + states) / 64 * 64;
    *moved = *n * size * (3 + 2 * states);
    const size_t block_bytes = (2 + states) * (*n * size + 4096 + 256);
    unsigned char *block = aligned_alloc(4096, (block_bytes + 4095) / 4096 * 4096);
    if (!block) {
        perror("bench");
        exit(2);
    }
    memset(block, 0x3c, block_bytes); /* an ordinary number in every dtype */
    const of_span span = carve(block, *n * size, used, *n);

    double best = 1e9;
    const double end = now() + 0.15;
    for (int i = 0; i < 3 || now() < end; i++) {
        const double start = now();
        row->run(&span, scalars);
        const double took = now() - start;
        best = took < best ? took : best;
    }
    free(block);
    return best;
}

void bench_header(void) {
    printf("%-32s %22s %22s\n", "", "in the L2 cache", "in memory");
    printf("%-32s %11s %10s %11s %10s\n", "row", "ns/element", "GB/s", "ns/element", "GB/s");
}

void bench_row(const of_kernel *row, const char *name) {
    printf("%-32s", name);
    for (int large = 0; large < 2; large++) {
        size_t n, moved;
        const size_t bytes = large ? BENCH_LARGE_BYTES : BENCH_CACHED_BYTES;
        const double took = bench_seconds(row, bytes, &n, &moved);
        printf(" %11.3f %10.1f", 1e9 * took / (double)n, 1e-9 * (double)moved / took);
    }
    printf("\n");
    fflush(stdout);
}
