/* SPDX-License-Identifier: BSD-3-Clause */
/* watch.h: what libfake_optfuse_cuda.so, which runs optfuse's CUDA kernels on
 * the CPU, tells libfake_cuda.so, which plays the GPU for torch.
 * Neither is linked with the other; fakecuda.py hands over the functions. */
#ifndef OPTFUSE_TEST_WATCH_H
#define OPTFUSE_TEST_WATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../kernels/cuda/launch_ranges.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A kernel is about to run on the stream (a CUstream), and to read and write these. */
typedef void fake_launched(void *stream, const char *kernel, const launch_range *ranges, size_t n);

/* The graph that is being captured on the stream; 0: none. */
typedef uint64_t fake_graph_of(void *stream);

/* The device whose context is current. */
typedef int fake_device_now(void);

/* Makes a launch anew, on this stream. */
typedef void fake_again(const void *work, void *stream);

/* Whether the launch that was made on the stream is to be kept, because a graph records it. */
typedef bool fake_keep(void *stream, const void *work, fake_again *again);

/* The library with the kernels: whom to tell, NULL: nobody, and whom to ask. */
void fake_optfuse_watch(fake_launched *launched, fake_graph_of *graph_of,
                        fake_device_now *device_now, fake_keep *keep);

#ifdef __cplusplus
}
#endif
#endif
