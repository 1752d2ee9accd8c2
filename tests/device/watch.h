/* SPDX-License-Identifier: BSD-3-Clause */
/* watch.h: what libfake_optfuse_cuda.so, which runs optfuse's CUDA kernels on
 * the CPU, asks and tells libfake_cuda.so, which plays the GPU for torch.
 * Neither is linked with the other; fakecuda.py hands over the functions. */
#ifndef OPTFUSE_TEST_WATCH_H
#define OPTFUSE_TEST_WATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fake_range {
    const void *address;
    size_t bytes;
    bool write;
} fake_range;

typedef struct fake_watch {
    /* A kernel has run on the stream, and read and written these. */
    void (*launched)(void *stream, const char *kernel, const fake_range *ranges, size_t n);
    /* The number of the graph that is being captured on the stream, 0 if none. */
    uint64_t (*capture)(void *stream);
    /* The calling thread's current device. */
    int (*device)(void);
} fake_watch;

#ifdef __cplusplus
}
#endif
#endif
