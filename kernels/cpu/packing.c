/* SPDX-License-Identifier: BSD-3-Clause */
/* packing.c: one row of packing.h, compiled once per dtype and instruction set. The build defines
 * OF_DTYPE, OF_DTYPE_<NAME> and OF_ISA; and OF_PLAIN for the row that unpacks one element at a
 * time, with which the others are compared. */
#include "../packing.h"
#include "stored.h"

#define OF_PACKING(name) OF_PASTE(OF_PASTE(of_packing, name), OF_PASTE(OF_DTYPE, OF_ISA))

of_packing_add_fn OF_PACKING(add);
of_packing_merge_fn OF_PACKING(merge);
of_packing_unpack_fn OF_PACKING(unpack);

static void add_row(of_stored *restrict to, const of_stored *restrict from, size_t n,
                    of_stored scale) {
    OF_NO_ALIAS
    for (size_t i = 0; i < n; i++)
        to[i] += scale * from[i];
}

void OF_PACKING(add)(void *packed, const void *matrix, size_t d, size_t ld, double scale) {
    of_stored *to = packed;
    const of_stored *from = matrix;
    for (size_t row = 0; row < d; row++) {
        add_row(to, from + row * ld + row, d - row, (of_stored)scale);
        to += d - row;
    }
}

void OF_PACKING(merge)(void *running, const void *sums, size_t n, double decay, double weight) {
    const of_stored keep = (of_stored)decay, take = (of_stored)weight;
    of_stored *to = running;
    const of_stored *from = sums;
    OF_NO_ALIAS
    for (size_t i = 0; i < n; i++)
        to[i] = keep * to[i] + take * from[i];
}

#ifdef OF_PLAIN

static void unpack(of_stored *to, const of_stored *from, size_t d, size_t ld) {
    for (size_t row = 0; row < d; row++)
        for (size_t column = row; column < d; column++)
            to[row * ld + column] = to[column * ld + row] = *from++;
}

#else

/* Square tiles with rows of one cache line. The columns of a tile, which are rows of the lower
 * half, are read from a copy in the nearest cache, and each is written in one go. Larger tiles
 * are slower: rows of a matrix often are a power of two apart, so that a column of it shares few
 * places of a cache. */
enum { TILE = 64 / sizeof(of_stored) };
typedef of_stored tile[TILE][TILE];

/* Where the packed row would have its column 0. */
static size_t row_start(size_t row, size_t d) {
    return row * d - row * (row + 1) / 2;
}

static void copy_tile(tile t, of_stored *to, const of_stored *from, size_t d, size_t ld, size_t row,
                      size_t column) {
    for (size_t i = 0; i < TILE; i++) {
        const of_stored *in = from + row_start(row + i, d) + column;
        of_stored *out = to + (row + i) * ld + column;
        for (size_t j = 0; j < TILE; j++)
            t[i][j] = in[j];
        for (size_t j = 0; j < TILE; j++)
            out[j] = t[i][j];
    }
}

static void mirror_tile(tile t, of_stored *to, size_t ld, size_t row, size_t column) {
    for (size_t j = 0; j < TILE; j++) {
        of_stored *out = to + (column + j) * ld + row;
        for (size_t i = 0; i < TILE; i++)
            out[i] = t[i][j];
    }
}

/* Elements [from, to) of these rows, and their mirror image. */
static void unpack_rest(of_stored *to, const of_stored *from, size_t d, size_t ld, size_t row,
                        size_t end, size_t column, size_t end_column) {
    for (; row < end; row++)
        for (size_t j = column > row ? column : row; j < end_column; j++)
            to[row * ld + j] = to[j * ld + row] = from[row_start(row, d) + j];
}

static void unpack(of_stored *to, const of_stored *from, size_t d, size_t ld) {
    const size_t whole = d / TILE * TILE;
    tile t;
    for (size_t row = 0; row < whole; row += TILE) {
        unpack_rest(to, from, d, ld, row, row + TILE, row, row + TILE);
        for (size_t column = row + TILE; column < whole; column += TILE) {
            copy_tile(t, to, from, d, ld, row, column);
            mirror_tile(t, to, ld, row, column);
        }
        unpack_rest(to, from, d, ld, row, row + TILE, whole, d);
    }
    unpack_rest(to, from, d, ld, whole, d, whole, d);
}

#endif

void OF_PACKING(unpack)(void *matrix, const void *packed, size_t d, size_t ld, double damping) {
    of_stored *to = matrix;
    unpack(to, packed, d, ld);
    for (size_t i = 0; i < d; i++)
        to[i * ld + i] += (of_stored)damping;
}
