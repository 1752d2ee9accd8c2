// SPDX-License-Identifier: BSD-3-Clause
// packing_check.cu: of_cuda_pack() on this GPU against the plain C rows of packing.h. Arrays go
// there and back, each somewhere in a larger piece of memory, of which the rest must stay.
#include <string.h>
#include <vector>

#include "cuda/cuda_kernels.h"
#include "gpu.h"
#include "packing_check.h"

extern "C" {
#include "../kernels/packing_memory.h"
}

enum { LARGEST = 1100, SPARE = 256, PATTERN = 0xa5 };

static unsigned char *device[2]; // what is written, what is only read
static size_t room;
static uint64_t places = 1;
static bool intact;

static unsigned char *upload(int which, const void *from, size_t bytes, size_t size) {
    unsigned char *to = device[which] + random_next(&places) % 16 * size;
    GPU(cudaMemset(device[which], PATTERN, room));
    GPU(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
    return to;
}

static bool only_pattern(const unsigned char *begin, const unsigned char *end) {
    while (begin < end && *begin == PATTERN)
        begin++;
    return begin == end;
}

static void run(of_cuda_packing packing, size_t written, size_t read) {
    const size_t size = of_dtype_size(packing.dtype);
    const size_t bytes = written * size;
    if (packing.n == 0)
        return;
    void *const to = packing.to;
    unsigned char *const there = upload(0, to, bytes, size);
    packing.to = there;
    packing.from = upload(1, packing.from, read * size, size);
    if (of_cuda_pack(&packing) != OF_CUDA_OK) {
        fprintf(stderr, "%s\n", of_cuda_error());
        exit(2);
    }
    GPU(cudaDeviceSynchronize());
    std::vector<unsigned char> all(room);
    GPU(cudaMemcpy(all.data(), device[0], room, cudaMemcpyDeviceToHost));
    const unsigned char *const begin = all.data() + (there - device[0]);
    memcpy(to, begin, bytes);
    intact = intact && only_pattern(all.data(), begin) &&
             only_pattern(begin + bytes, all.data() + room);
}

static of_cuda_packing call(of_cuda_packing_task task, of_dtype dtype, void *to, const void *from,
                            size_t n, size_t ld, double first, double second) {
    of_cuda_packing packing = {};
    packing.task = task;
    packing.dtype = dtype;
    packing.to = to;
    packing.from = from;
    packing.n = n;
    packing.ld = ld;
    packing.numbers[0] = first;
    packing.numbers[1] = second;
    return packing;
}

template <of_dtype DTYPE>
static void add(void *packed, const void *matrix, size_t d, size_t ld, double scale) {
    run(call(OF_CUDA_PACKING_ADD, DTYPE, packed, matrix, d, ld, scale, 0), of_packed_elements(d),
        packing_footprint(d, ld));
}

template <of_dtype DTYPE>
static void merge(void *running, const void *sums, size_t n, double decay, double weight) {
    run(call(OF_CUDA_PACKING_MERGE, DTYPE, running, sums, n, n, decay, weight), n, n);
}

template <of_dtype DTYPE>
static void unpack(void *matrix, const void *packed, size_t d, size_t ld, double damping) {
    run(call(OF_CUDA_PACKING_UNPACK, DTYPE, matrix, packed, d, ld, damping, 0),
        packing_footprint(d, ld), of_packed_elements(d));
}

template <of_dtype DTYPE> static int check(packing_memory *pair, uint64_t random, int rounds) {
    const of_packing_row row = {DTYPE, OF_ISA_C, add<DTYPE>, merge<DTYPE>, unpack<DTYPE>};
    int bad = 0;
    for (int i = 0; i < rounds; i++) {
        const size_t most = i % 4 == 3 ? LARGEST : 100;
        const size_t d = random_next(&random) % (most + 1);
        const size_t ld = d + (i % 2 ? random_next(&random) % (MOST_GAP + 1) : 0);
        intact = true;
        bad += !packing_row_agrees(&row, &pair[0], &pair[1], d, ld, &random) || !intact;
    }
    printf("%-4s packing %s: %d of %d differ from the plain C row\n", bad ? "FAIL" : "ok",
           of_dtype_name(DTYPE), bad, rounds);
    return bad;
}

int check_packing(uint64_t seed, int rounds) {
    static packing_memory pair[2];
    room = packing_footprint(LARGEST, LARGEST + MOST_GAP) * sizeof(double) + SPARE;
    for (int i = 0; i < 2; i++) {
        packing_memory_create(&pair[i], LARGEST);
        GPU(cudaMalloc(&device[i], room));
    }
    return check<OF_FLOAT32>(pair, seed, rounds) + check<OF_FLOAT64>(pair, seed, rounds);
}
