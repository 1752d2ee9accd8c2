/* SPDX-License-Identifier: BSD-3-Clause */
/* gpu.h: what the GPU programs share. For CUDA C++. */
#ifndef OPTFUSE_TEST_GPU_H
#define OPTFUSE_TEST_GPU_H

#include <cuda_runtime.h>
#include <stdio.h>
#include <stdlib.h>

static inline void gpu_check(cudaError_t error, const char *what) {
    if (error == cudaSuccess)
        return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    exit(2);
}

#define GPU(call) gpu_check(call, #call)

/* The chip; exits with status 77, "skipped", where there is none. */
static inline cudaDeviceProp gpu_open(void) {
    cudaDeviceProp chip;
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        printf("no GPU: nothing was checked\n");
        exit(77);
    }
    GPU(cudaGetDeviceProperties(&chip, 0));
    GPU(cudaFree(NULL)); /* makes the context */
    printf("%s, compute capability %d.%d\n", chip.name, chip.major, chip.minor);
    return chip;
}

#endif
