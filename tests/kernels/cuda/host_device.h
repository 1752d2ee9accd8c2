/* SPDX-License-Identifier: BSD-3-Clause */
/* host_device.h: lets a .cu file compile for the CPU. A kernel becomes a
 * function that one thread of one block runs; host_driver.c calls it for all, and
 * again for what comes after each barrier: the kernel says which phase is which. */
#ifndef OPTFUSE_TEST_HOST_DEVICE_H
#define OPTFUSE_TEST_HOST_DEVICE_H

#include <stddef.h>

typedef struct host_index {
    unsigned x;
} host_index;

#ifdef __cplusplus
#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline, unused))
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __syncthreads()
#define OF_PHASE(number) (host_phase == (number))
#define OF_SHARED_ROWS(name) of_vector *const name = reinterpret_cast<of_vector *>(host_shared)
#define blockIdx host_block_index
#define blockDim host_block_size
#define threadIdx host_thread_index
#define HOST_THREAD thread_local
extern "C" {
#else
#define HOST_THREAD _Thread_local
#endif

extern HOST_THREAD host_index host_block_index, host_block_size, host_thread_index;
extern HOST_THREAD unsigned host_phase;
/* The block's shared memory, as much as the launch has asked for. */
extern HOST_THREAD unsigned char *host_shared;
extern HOST_THREAD size_t host_shared_bytes;

#ifdef __cplusplus
}
#endif
#endif
