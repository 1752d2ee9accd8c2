/* SPDX-License-Identifier: BSD-3-Clause */
/* gpu.h: what the GPU programs share. For CUDA C++. */
#ifndef OPTFUSE_TEST_GPU_H
#define OPTFUSE_TEST_GPU_H

#include <chrono>
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

/* Keeps the stream busy for so many cycles. */
static __global__ void gpu_spin(long long cycles) {
    const long long end = clock64() + cycles;
    while (clock64() < end)
        continue;
}

/* About a millisecond of work, so that what is launched after it waits for no host. */
static inline void gpu_queue(void) {
    static int kilohertz = 0;
    if (kilohertz == 0)
        GPU(cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, 0));
    gpu_spin<<<1, 1>>>(kilohertz);
    GPU(cudaGetLastError());
}

/* Milliseconds that a run takes the GPU, without the host's part of it. */
template <class F> static float gpu_milliseconds(F run) {
    cudaEvent_t start, stop;
    float took;
    GPU(cudaEventCreate(&start));
    GPU(cudaEventCreate(&stop));
    gpu_queue();
    GPU(cudaEventRecord(start));
    run();
    GPU(cudaEventRecord(stop));
    GPU(cudaEventSynchronize(stop));
    GPU(cudaEventElapsedTime(&took, start, stop));
    GPU(cudaEventDestroy(start));
    GPU(cudaEventDestroy(stop));
    return took;
}

/* Until the clocks are up: 0.3 s. */
template <class F> static void gpu_warm_up(F run) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
    do {
        for (int i = 0; i < 10; i++)
            run();
        GPU(cudaDeviceSynchronize());
    } while (std::chrono::steady_clock::now() < end);
}

#endif
