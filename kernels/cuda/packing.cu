// SPDX-License-Identifier: BSD-3-Clause
// packing.cu: the functions of ../packing.h on a GPU, with the CPU's bits. The build compiles
// them once per dtype.
//
// Rows of a triangle are taken in pairs, the first with the last, the second with the last but
// one: as all pairs of d rows have d + 1 elements, no place is found by a square root. The middle
// row of an odd number is alone.
#include "../cpu/stored.h"
#include "table.h"

#ifdef __CUDACC__
#define OF_PHASE(number) true // a barrier comes between two of them
#endif
#define OF_DEVICE_FN static __device__ __forceinline__
#define OF_PACKING(task) OF_PASTE(OF_PASTE(of_cuda_packing, task), OF_DTYPE)
#define OF_PACKING_KERNEL(task)                                                                    \
    extern "C" __global__ void __launch_bounds__(OF_CUDA_THREADS)                                  \
        OF_PACKING(task)(OF_CUDA_ARGUMENT(of_cuda_packing_table) table)

enum {
    OF_AT_ONCE = 4, // elements of a thread that are on their way from memory together
    OF_TILE_STEP = OF_CUDA_THREADS / OF_CUDA_TILE // rows that a block takes at once
};
static_assert(OF_TILE_STEP * OF_AT_ONCE == OF_CUDA_TILE, "a thread has one column of a tile");

// Where the packed row would have its column 0.
OF_DEVICE_FN uint64_t of_row_start(uint64_t row, uint64_t d) {
    return row * d - row * (row + 1) / 2;
}

OF_DEVICE_FN void of_add_row(const of_cuda_packing_table &table, uint64_t row, of_stored scale) {
    const uint64_t place = of_row_start(row, table.n) + row;
    of_stored *__restrict__ to = static_cast<of_stored *>(table.to) + place;
    const of_stored *__restrict__ from =
        static_cast<const of_stored *>(table.from) + row * table.ld + row;
    const unsigned n = static_cast<unsigned>(table.n - row), round = blockDim.x * OF_AT_ONCE;
    unsigned at = threadIdx.x;
    for (; at + round - blockDim.x < n; at += round) {
        of_stored sum[OF_AT_ONCE], value[OF_AT_ONCE];
#pragma unroll
        for (int i = 0; i < OF_AT_ONCE; i++) {
            value[i] = from[at + i * blockDim.x];
            sum[i] = to[at + i * blockDim.x];
        }
#pragma unroll
        for (int i = 0; i < OF_AT_ONCE; i++)
            to[at + i * blockDim.x] = sum[i] + scale * value[i];
    }
    for (; at < n; at += blockDim.x)
        to[at] += scale * from[at];
}

// A block takes a pair of rows.
OF_PACKING_KERNEL(add) {
    const of_stored scale = static_cast<of_stored>(table.numbers[0]);
    const uint64_t first = blockIdx.x, last = table.n - 1 - first;
    of_add_row(table, first, scale);
    if (last != first)
        of_add_row(table, last, scale);
}

OF_PACKING_KERNEL(merge) {
    const of_stored keep = static_cast<of_stored>(table.numbers[0]);
    const of_stored take = static_cast<of_stored>(table.numbers[1]);
    of_stored *__restrict__ to = static_cast<of_stored *>(table.to);
    const of_stored *__restrict__ from = static_cast<const of_stored *>(table.from);
    const uint64_t begin = static_cast<uint64_t>(blockIdx.x) * OF_CUDA_MERGED + threadIdx.x;
    of_stored old[OF_AT_ONCE], sum[OF_AT_ONCE];
    static_assert(OF_CUDA_MERGED == OF_CUDA_THREADS * OF_AT_ONCE, "a block goes round once");
#pragma unroll
    for (int i = 0; i < OF_AT_ONCE; i++) {
        const uint64_t at = begin + i * OF_CUDA_THREADS;
        old[i] = at < table.n ? to[at] : 0;
        sum[i] = at < table.n ? from[at] : 0;
    }
#pragma unroll
    for (int i = 0; i < OF_AT_ONCE; i++)
        if (begin + i * OF_CUDA_THREADS < table.n)
            to[begin + i * OF_CUDA_THREADS] = keep * old[i] + take * sum[i];
}

// A tile of the upper triangle, in elements.
struct of_tile {
    uint64_t row, column;
    bool none; // the second of a pair of rows that is one
};

// Tiles are in a triangle, too, and a block has one of them.
OF_DEVICE_FN of_tile of_find_tile(uint64_t d, unsigned block) {
    const unsigned tiles = static_cast<unsigned>((d + OF_CUDA_TILE - 1) / OF_CUDA_TILE);
    const unsigned first = block / (tiles + 1), last = tiles - 1 - first;
    const unsigned at = block % (tiles + 1), row = at < tiles - first ? first : last;
    const unsigned column = row == first ? first + at : at - 1;
    return {static_cast<uint64_t>(row) * OF_CUDA_TILE,
            static_cast<uint64_t>(column) * OF_CUDA_TILE, column >= tiles};
}

// Both halves of a matrix are written by whole rows of a tile: the lower one from a copy.
typedef of_stored of_copy[OF_CUDA_TILE][OF_CUDA_TILE + 1]; // a column is in all banks of memory

OF_DEVICE_FN void of_unpack_upper(const of_cuda_packing_table &table, const of_tile &tile,
                                  of_copy copy) {
    const unsigned x = threadIdx.x % OF_CUDA_TILE, y = threadIdx.x / OF_CUDA_TILE;
    of_stored *__restrict__ to = static_cast<of_stored *>(table.to);
    const of_stored *__restrict__ from = static_cast<const of_stored *>(table.from);
    const uint64_t column = tile.column + x;
    of_stored value[OF_AT_ONCE];
#pragma unroll
    for (int i = 0; i < OF_AT_ONCE; i++) {
        const uint64_t row = tile.row + y + i * OF_TILE_STEP;
        const bool inside = row <= column && column < table.n;
        value[i] = inside ? from[of_row_start(row, table.n) + column] : 0;
    }
#pragma unroll
    for (int i = 0; i < OF_AT_ONCE; i++) {
        const uint64_t row = tile.row + y + i * OF_TILE_STEP;
        copy[y + i * OF_TILE_STEP][x] = value[i];
        if (row == column)
            value[i] += static_cast<of_stored>(table.numbers[0]);
        if (row <= column && column < table.n)
            to[row * table.ld + column] = value[i];
    }
}

OF_DEVICE_FN void of_unpack_lower(const of_cuda_packing_table &table, const of_tile &tile,
                                  const of_copy copy) {
    const unsigned x = threadIdx.x % OF_CUDA_TILE, y = threadIdx.x / OF_CUDA_TILE;
    of_stored *to = static_cast<of_stored *>(table.to);
    const uint64_t column = tile.row + x;
#pragma unroll
    for (int i = 0; i < OF_AT_ONCE; i++) {
        const uint64_t row = tile.column + y + i * OF_TILE_STEP;
        if (column < row && row < table.n)
            to[row * table.ld + column] = copy[x][y + i * OF_TILE_STEP];
    }
}

OF_PACKING_KERNEL(unpack) {
    __shared__ of_copy copy;
    const of_tile tile = of_find_tile(table.n, blockIdx.x);
    if (tile.none) // all of the block
        return;
    if (OF_PHASE(0))
        of_unpack_upper(table, tile, copy);
    __syncthreads();
    if (OF_PHASE(1))
        of_unpack_lower(table, tile, copy);
}
