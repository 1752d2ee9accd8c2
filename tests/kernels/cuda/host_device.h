/* SPDX-License-Identifier: BSD-3-Clause */
/* host_device.h: lets a .cu file compile for the CPU. A kernel becomes a
 * function that one thread of one block runs; host_driver.c calls it for all. */
#ifndef OPTFUSE_TEST_HOST_DEVICE_H
#define OPTFUSE_TEST_HOST_DEVICE_H

typedef struct host_index {
    unsigned x;
} host_index;

#ifdef __cplusplus
#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline, unused))
#define __launch_bounds__(...)
#define blockIdx host_block_index
#define blockDim host_block_size
#define threadIdx host_thread_index
#define HOST_THREAD thread_local
extern "C" {
#else
#define HOST_THREAD _Thread_local
#endif

extern HOST_THREAD host_index host_block_index, host_block_size, host_thread_index;

#ifdef __cplusplus
}
#endif
#endif
