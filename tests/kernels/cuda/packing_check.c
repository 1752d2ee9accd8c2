/* SPDX-License-Identifier: BSD-3-Clause */
/* packing_check.c: the kernels of packing.cu give the bits of the CPU's C rows, and write nothing
 * else. */
#include "packing_check.h"

#include <stdio.h>
#include <string.h>

#include "../packing_memory.h"
#include "cuda/cuda_kernels.h"
#include "cuda/table.h"
#include "host_driver.h"

/* A thread adds four elements of a row at once where the row has more than 768. */
enum { SMALL = 70, LARGEST = 335, LONG = 801 };
static const size_t large[] = {97, 128, 131, 257, LARGEST};

static int failures;

static void check(bool right, const char *promise) {
    if (!right) {
        printf("FAIL packing: %s\n", promise);
        failures++;
    }
}

static void pack(of_cuda_packing packing) {
    host.launches = 0;
    if (of_cuda_pack(&packing) != OF_CUDA_OK || host.launches != (packing.n > 0))
        check(false, of_cuda_error());
}

/* A row of packing.h by the kernels. */
#define ROW(dtype, code)                                                                           \
    static void add_##dtype(void *packed, const void *matrix, size_t d, size_t ld, double scale) { \
        pack((of_cuda_packing){OF_CUDA_PACKING_ADD, code, 0, NULL, packed, matrix, d, ld,          \
                               {scale}});                                                          \
    }                                                                                              \
    static void merge_##dtype(void *running, const void *sums, size_t n, double decay,             \
                              double weight) {                                                     \
        pack((of_cuda_packing){OF_CUDA_PACKING_MERGE, code, 0, NULL, running, sums, n, 0,          \
                               {decay, weight}});                                                  \
    }                                                                                              \
    static void unpack_##dtype(void *matrix, const void *packed, size_t d, size_t ld,              \
                               double damping) {                                                   \
        pack((of_cuda_packing){OF_CUDA_PACKING_UNPACK, code, 0, NULL, matrix, packed, d, ld,       \
                               {damping}});                                                        \
    }                                                                                              \
    static const of_packing_row dtype##_row = {code, OF_ISA_C, add_##dtype, merge_##dtype,         \
                                               unpack_##dtype};
ROW(float32, OF_FLOAT32)
ROW(float64, OF_FLOAT64)

static void check_size(const of_packing_row *row, packing_memory pair[2], size_t d,
                       uint64_t *random) {
    for (int round = 0; round < 4; round++) {
        const size_t ld = d + (round % 2 ? 1 + random_next(random) % MOST_GAP : 0);
        host.order = (unsigned)(random_next(random) % HOST_ORDERS);
        if (packing_row_agrees(row, &pair[0], &pair[1], d, ld, random))
            continue;
        printf("  %s, d = %zu, ld = %zu:\n", of_dtype_name(row->dtype), d, ld);
        check(false, "bits or places differ from those of the CPU's row");
    }
}

static void check_sizes(const of_packing_row *row, uint64_t random) {
    static packing_memory pairs[3][2];
    static const size_t most[] = {SMALL, LARGEST, LONG};
    for (int i = 0; i < 6; i++)
        packing_memory_create(&pairs[i / 2][i % 2], most[i / 2]);
    for (size_t d = 0; d <= SMALL; d++)
        check_size(row, pairs[0], d, &random);
    for (size_t i = 0; i < sizeof large / sizeof *large; i++)
        check_size(row, pairs[1], large[i], &random);
    check_size(row, pairs[2], LONG, &random);
    for (int i = 0; i < 6; i++)
        packing_memory_destroy(&pairs[i / 2][i % 2]);
}

static void check_calls(void) {
    static double matrix[100 * 100], packed[5050];
    of_cuda_packing call = {.task = OF_CUDA_PACKING_ADD, .dtype = OF_FLOAT64, .stream = packed,
                            .to = packed, .from = matrix, .n = 100, .ld = 100};
    check(of_cuda_pack(&call) == OF_CUDA_OK && host.blocks == 50 && host.stream == packed,
          "a block adds two rows, on the stream that was given");
    call.task = OF_CUDA_PACKING_UNPACK;
    call.to = matrix;
    call.from = packed;
    check(of_cuda_pack(&call) == OF_CUDA_OK && host.blocks == 10, "and unpacks one tile");
    host.loaded[0] = '\0';
    check(of_cuda_prepare_packing(OF_FLOAT64, 0) == OF_CUDA_OK &&
              strcmp(host.loaded, "of_cuda_packing_add_float64 of_cuda_packing_merge_float64 "
                                  "of_cuda_packing_unpack_float64 ") == 0,
          "its kernels can be loaded beforehand");
    check(of_cuda_prepare_packing(OF_BFLOAT16, 0) == OF_CUDA_UNSUPPORTED,
          "there are none of 16 bits");
    host.launches = 0;
    call.dtype = OF_FLOAT16;
    check(of_cuda_pack(&call) == OF_CUDA_UNSUPPORTED && strstr(of_cuda_error(), "float16"),
          "nor are they launched");
    call.dtype = OF_FLOAT64;
    call.ld = 99;
    check(of_cuda_pack(&call) == OF_CUDA_INVALID, "rows may not overlap");
    call.ld = call.n = OF_CUDA_MOST_ROWS + 1;
    check(of_cuda_pack(&call) == OF_CUDA_INVALID, "a block's number has no room for more rows");
    call.ld = call.n = 100;
    call.from = NULL;
    check(of_cuda_pack(&call) == OF_CUDA_INVALID, "an array is missing");
    call.from = (char *)packed + 4;
    check(of_cuda_pack(&call) == OF_CUDA_INVALID && host.launches == 0,
          "half an element's address");
    call.from = packed;
    host.fail_launch = 1;
    check(of_cuda_pack(&call) == OF_CUDA_FAILED, "a failing launch is reported");
    host.fail_launch = 0;
}

int check_packing(uint64_t seed) {
    check_sizes(&float32_row, seed);
    check_sizes(&float64_row, seed);
    check_calls();
    return failures;
}
