/* SPDX-License-Identifier: BSD-3-Clause */
/* table.h: what a kernel gets in its arguments; filled by launch.c, advance.c,
 * asgd_next.c and packing.c, read by the .cu files. */
#ifndef OPTFUSE_CUDA_TABLE_H
#define OPTFUSE_CUDA_TABLE_H

#include <stddef.h>
#include <stdint.h>

#include "../program.h"

/* How a kernel receives its table: in constant memory; where the tests run it
 * on the CPU, by reference. */
#ifdef __CUDACC__
#define OF_CUDA_ARGUMENT(table) const __grid_constant__ table
#else
#define OF_CUDA_ARGUMENT(table) const table &
#endif

enum {
    OF_CUDA_THREADS = 256, /* of a block */
    /* A block that runs a program has a row of shared memory for each register, and each of its
     * threads a part of all rows. The bytes of a row are for elements of 32 or 64 bits; of 16 bits
     * it has half of them: of_cuda_row_bytes(). */
    OF_CUDA_ROW_BYTES = 2048,
    OF_CUDA_ROW_PART = 32,
    OF_CUDA_PROGRAM_THREADS = OF_CUDA_ROW_BYTES / OF_CUDA_ROW_PART,
    /* Elements that a block updates are a multiple of this, so that it begins at a
     * whole cache line where its tensor does. */
    OF_CUDA_CHUNK_UNIT = 64,
    /* Kernel arguments may have 32,764 bytes. All of them are copied at every
     * launch, so a few tensors get a small table. */
    OF_CUDA_SMALL_BYTES = 2048,
    OF_CUDA_LARGE_BYTES = 32760
};

typedef struct of_cuda_common {
    double hyper[OF_MAX_HYPER]; /* or the bytes of prepared scalars: of_rule.prepare_gpu() */
    const float *lr_at;
    const float *grad_scale_at;
    const float *found_inf_at;
    const void *factor_at;
    uint32_t entries;
    uint32_t chunk;          /* elements that a block updates */
    /* A step word is a pointer, else the bits of a float and, above them, of_gpu_entry.parameter. */
    uint8_t steps_on_device;
    uint8_t early;           /* of_cuda_early() of this chip */
    uint8_t numbers;         /* of_gpu_entry.numbers_at that the rule has */
    uint8_t runs_programs;
    uint8_t wide_state; /* of_gpu_update.wide_state */
    uint16_t reads, writes; /* of_program.reads and writes */
    uint16_t code; /* instructions of the program; their words are before the first entry's */
} of_cuda_common;

/* Bytes of a row, which has as many elements of 16 bits as of 32. */
static inline unsigned of_cuda_row_bytes(of_dtype dtype) {
    return dtype == OF_BFLOAT16 || dtype == OF_FLOAT16 ? OF_CUDA_ROW_BYTES / 2 : OF_CUDA_ROW_BYTES;
}

/* An instruction is two words, or three where numbers are doubles: from its lowest byte on
 * operation, to, a, b and c; then s and t in the type of the computation. */
enum { OF_CUDA_REGISTERS = OF_REGISTER_STATE + 12, OF_CUDA_MOST_CODE = 256 };
static inline size_t of_cuda_instruction_words(of_dtype dtype) {
    return dtype == OF_FLOAT64 ? 3 : 2;
}

/* An entry is `stride` words: param, grad, the used states, the numbers, step, n, and
 * the first block that works on it. First blocks ascend; the first is 0. */
enum { OF_CUDA_WORDS_BESIDE_STATE = 5 }; /* and numbers */

#define OF_CUDA_WORDS(bytes) (((bytes) - sizeof(of_cuda_common)) / sizeof(uint64_t))

typedef struct of_cuda_small_table {
    of_cuda_common common;
    uint64_t words[OF_CUDA_WORDS(OF_CUDA_SMALL_BYTES)];
} of_cuda_small_table;

typedef struct of_cuda_large_table {
    of_cuda_common common;
    uint64_t words[OF_CUDA_WORDS(OF_CUDA_LARGE_BYTES)];
} of_cuda_large_table;

/* The table of of_cuda_advance. */
enum { OF_CUDA_STEPS = 500 };
typedef struct of_cuda_steps {
    const float *less_at;
    uint64_t n;
    float *step[OF_CUDA_STEPS];
} of_cuda_steps;

/* The table of of_cuda_next_numbers(): asgd_schedule of rules/asgd_next.h, and whose. */
enum { OF_CUDA_NUMBERS = 160 };
typedef struct of_cuda_numbers {
    double lr, growth, alpha, t0;
    uint64_t n;
    struct {
        const float *step; /* of the update before this one */
        float *eta, *mu;
    } at[OF_CUDA_NUMBERS];
} of_cuda_numbers;

/* The table of of_cuda_pack(). A block adds a pair of rows, merges so many elements, or unpacks
 * a square tile of so many rows. */
enum { OF_CUDA_MERGED = 1024, OF_CUDA_TILE = 32 };
typedef struct of_cuda_packing_table {
    void *to;
    const void *from;
    uint64_t n;  /* rows, or elements to merge */
    uint64_t ld;
    double numbers[2];
} of_cuda_packing_table;

#endif
