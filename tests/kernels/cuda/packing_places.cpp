// SPDX-License-Identifier: BSD-3-Clause
// packing_places.cpp: the places that packing.cu computes, for more rows than there is memory for
// in a test.
#include "host_device.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/cuda_kernels.h"
#include "cuda/packing.cu"

thread_local host_index host_block_index, host_block_size, host_thread_index;
thread_local unsigned host_phase;

namespace {

constexpr uint64_t most_rows = 20480, most_tiles = most_rows / OF_CUDA_TILE;

void need(bool right, const char *promise, uint64_t number) {
    if (right)
        return;
    std::printf("FAIL %s: %llu\n", promise, static_cast<unsigned long long>(number));
    std::exit(EXIT_FAILURE);
}

// Each tile of the upper triangle is one block's, and at most (tiles + 1) / 2 blocks have none.
void check_tiles(uint64_t tiles) {
    std::vector<bool> found(tiles * tiles);
    uint64_t count = 0, none = 0;
    for (uint64_t block = 0; block < (tiles + 1) / 2 * (tiles + 1); block++) {
        const of_tile tile = of_find_tile(tiles * OF_CUDA_TILE, static_cast<unsigned>(block));
        none += tile.none;
        if (tile.none)
            continue;
        const uint64_t row = tile.row / OF_CUDA_TILE, column = tile.column / OF_CUDA_TILE;
        need(row <= column && column < tiles, "a tile outside of the triangle of", tiles);
        need(!found[row * tiles + column], "a tile twice, of", tiles);
        found[row * tiles + column] = true;
        count++;
    }
    need(count == tiles * (tiles + 1) / 2, "a tile is left out, of", tiles);
    need(none == (tiles % 2 ? (tiles + 1) / 2 : 0), "blocks without a tile, of", tiles);
}

// A row begins where the one before it ends.
void check_rows(uint64_t d) {
    uint64_t end = 0;
    for (uint64_t row = 0; row < d; row++) {
        need(of_row_start(row, d) + row == end, "where a row begins, of", d);
        end += d - row;
    }
}

} // namespace

int main() {
    for (uint64_t tiles = 1; tiles <= most_tiles; tiles += tiles < 100 ? 1 : 37)
        check_tiles(tiles);
    check_tiles(most_tiles);
    check_tiles(most_tiles - 1);
    for (uint64_t d : {1, 2, 3, 1000, 4608, 4609, 20000})
        check_rows(d);
    check_rows(OF_CUDA_MOST_ROWS);
    std::printf("all tiles and rows are where they belong\n");
    return EXIT_SUCCESS;
}
