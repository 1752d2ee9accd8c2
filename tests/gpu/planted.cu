// SPDX-License-Identifier: BSD-3-Clause
// planted: one defect for each tool of compute-sanitizer, to see that the tool
// finds defects on this machine at all.
//
//   planted memcheck | racecheck | synccheck | initcheck
#include <string.h>

#include "gpu.h"

__global__ void writes_past_the_end(int *values, int n) {
    values[n + threadIdx.x] = 1;
}

__global__ void races(int *out) {
    __shared__ int shared[64];
    shared[threadIdx.x] = (int)threadIdx.x; // read by the other warp, with no barrier between
    out[threadIdx.x] = shared[63 - threadIdx.x];
}

__global__ void diverges(int *out) {
    if (threadIdx.x < 16)
        __syncthreads(); // the other half of the warp never arrives
    out[threadIdx.x] = 1;
}

__global__ void forgets_a_thread(int *out) {
    if (threadIdx.x <= 16)
        __syncwarp(0xffff); // thread 16 takes part and is not in the mask
    out[threadIdx.x] = 1;
}

__global__ void reads_what_nobody_wrote(int *values) {
    values[threadIdx.x] += 1;
}

int main(int argc, char **argv) {
    const char *tool = argc > 1 ? argv[1] : "";
    int *values;
    gpu_open();
    GPU(cudaMalloc(&values, 64 * sizeof(int)));
    if (strcmp(tool, "memcheck") == 0)
        writes_past_the_end<<<1, 1>>>(values, 64);
    else if (strcmp(tool, "racecheck") == 0)
        races<<<1, 64>>>(values);
    else if (strcmp(tool, "synccheck") == 0)
        diverges<<<1, 32>>>(values), forgets_a_thread<<<1, 32>>>(values);
    else if (strcmp(tool, "initcheck") == 0)
        reads_what_nobody_wrote<<<1, 64>>>(values);
    else
        return 2;
    cudaDeviceSynchronize(); // its error is the tool's to report
    return 0;
}
