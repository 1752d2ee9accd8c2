// SPDX-License-Identifier: BSD-3-Clause
// kernel_bench: on a machine with a GPU, the bandwidth of the update kernels
// beside that of a kernel with the same streams of reads and writes and no
// arithmetic, one after the other in one run.
#include <algorithm>
#include <string.h>
#include <vector>

#include "cuda/cuda_kernels.h"
#include "cuda/table.h"
#include "gpu.h"

enum { RUNS = 40, MOST_STREAMS = 2 + OF_MAX_STATE };

struct streams {
    uint4 *at[MOST_STREAMS]; // parameter, gradient, states
    int n;
    size_t vectors; // of 16 bytes, in each
};

template <int STREAMS> __global__ void __launch_bounds__(OF_CUDA_THREADS) no_math(streams s) {
    const size_t chunk = 2048; // vectors: as many bytes as a block of float32 updates
    size_t at = blockIdx.x * chunk;
    const size_t end = at + chunk < s.vectors ? at + chunk : s.vectors;
    for (at += threadIdx.x; at < end; at += blockDim.x) {
        uint4 value[STREAMS];
#pragma unroll
        for (int i = 0; i < STREAMS; i++)
            value[i] = s.at[i][at];
#pragma unroll
        for (int i = 0; i < STREAMS; i++) {
            if (i == 1) // the gradient is only read
                continue;
            value[i].x ^= value[1].x, value[i].y ^= value[1].y;
            value[i].z ^= value[1].z, value[i].w ^= value[1].w;
            s.at[i][at] = value[i];
        }
    }
}

static void run_no_math(const streams &s) {
    const unsigned blocks = (unsigned)((s.vectors + 2047) / 2048);
    if (s.n == 2)
        no_math<2><<<blocks, OF_CUDA_THREADS>>>(s);
    else if (s.n == 3)
        no_math<3><<<blocks, OF_CUDA_THREADS>>>(s);
    else
        no_math<4><<<blocks, OF_CUDA_THREADS>>>(s);
}

struct task {
    const char *rule;
    of_dtype dtype;
    size_t n;
    int tensors; // the elements are split between so many
};

static of_gpu_update update_of(const task &t) {
    static const double adam[OF_MAX_HYPER] = {1e-3, 0.9, 0.999, 1e-8, 0.01, 0, 0, 1};
    static const double sgd[OF_MAX_HYPER] = {1e-3, 0.9};
    of_gpu_update update = {};
    update.rule = t.rule;
    update.dtype = t.dtype;
    update.hyper = strcmp(t.rule, "adam") == 0 ? adam : sgd;
    return update;
}

static std::vector<of_gpu_entry> entries_of(const task &t, const streams &s) {
    const size_t each = t.n / t.tensors, bytes = each * of_dtype_size(t.dtype);
    std::vector<of_gpu_entry> entries(t.tensors);
    for (int i = 0; i < t.tensors; i++) {
        auto at = [&](int stream) {
            return stream < s.n ? (void *)((char *)s.at[stream] + i * bytes) : nullptr;
        };
        entries[i] = {};
        entries[i].param = at(0);
        entries[i].grad = at(1);
        for (int k = 0; k < OF_MAX_STATE; k++)
            entries[i].state[k] = at(2 + k);
        entries[i].n = each;
        entries[i].step = 100;
    }
    return entries;
}

static float median(std::vector<float> values) {
    std::sort(values.begin(), values.end());
    return values[values.size() / 2];
}

static void launch(const of_gpu_update &update, const of_gpu_entry *entries, size_t n) {
    if (of_cuda_launch(&update, entries, n) == OF_CUDA_OK)
        return;
    fprintf(stderr, "%s\n", of_cuda_error());
    exit(2);
}

static streams streams_of(const task &t) {
    const size_t bytes = t.n * of_dtype_size(t.dtype);
    streams s = {};
    s.n = strcmp(t.rule, "adam") == 0 ? 4 : 3;
    s.vectors = bytes / 16;
    for (int i = 0; i < s.n; i++) {
        GPU(cudaMalloc(&s.at[i], bytes));
        GPU(cudaMemset(s.at[i], 0x3c, bytes)); // an ordinary number in every dtype
    }
    return s;
}

static void free_streams(const streams &s) {
    for (int i = 0; i < s.n; i++)
        GPU(cudaFree(s.at[i]));
}

static void measure(const task &t) {
    const size_t bytes = t.n * of_dtype_size(t.dtype);
    const streams s = streams_of(t);
    const of_gpu_update update = update_of(t);
    const std::vector<of_gpu_entry> entries = entries_of(t, s);
    std::vector<float> ours, theirs;
    const auto with = [&] { launch(update, entries.data(), entries.size()); };
    const auto without = [&] { run_no_math(s); };
    gpu_warm_up(with);
    gpu_warm_up(without);
    for (int i = 0; i < RUNS; i++) {
        ours.push_back(gpu_milliseconds(with));
        theirs.push_back(gpu_milliseconds(without));
    }
    const double moved = 1e-6 * (double)bytes * (2 * s.n - 1);
    printf("%-5s %-9s %10zu in %4d %10.1f %10.1f %7.3f\n", t.rule, of_dtype_name(t.dtype), t.n,
           t.tensors, moved / median(ours), moved / median(theirs), median(theirs) / median(ours));
    free_streams(s);
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    gpu_open();
    printf("%-15s %18s %10s %10s %7s\n", "", "elements, tensors", "GB/s", "no math", "share");
    for (const char *rule : {"adam", "sgd"})
        for (of_dtype dtype : {OF_FLOAT32, OF_BFLOAT16})
            for (size_t n : {size_t(1) << 20, size_t(1) << 24, size_t(1) << 26})
                for (int tensors : {1, 16, 64, 256})
                    measure({rule, dtype, n, tensors});
    return 0;
}
