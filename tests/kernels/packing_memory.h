/* SPDX-License-Identifier: BSD-3-Clause */
/* packing_memory.h: what a row of packing.h works on, between guard pages, and whether it gives the
 * bits of the C row. */
#ifndef OPTFUSE_TEST_PACKING_MEMORY_H
#define OPTFUSE_TEST_PACKING_MEMORY_H

#include "arrays.h"
#include "packing.h"

/* Two packed triangles and a matrix. */
typedef struct packing_memory {
    arrays packed, matrix;
} packing_memory;

enum { MOST_GAP = 9 }; /* between the rows of a matrix */

void packing_memory_create(packing_memory *m, size_t most_d);
void packing_memory_destroy(packing_memory *m);

/* Elements from the first to the last one. */
size_t packing_footprint(size_t d, size_t ld);

/* Runs all functions of the row on `mine` and of the C row on `theirs`, with random numbers.
 * Nothing else may be written, neither what they only read nor what is between the rows. */
bool packing_row_agrees(const of_packing_row *row, packing_memory *mine, packing_memory *theirs,
                        size_t d, size_t ld, uint64_t *random);

#endif
