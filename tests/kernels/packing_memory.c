/* SPDX-License-Identifier: BSD-3-Clause */
#include "packing_memory.h"

enum { TO = 0, FROM = 1 };

static const double factors[] = {1.0, 0.3, 0.0, 0.95, 1e-4, 3e30, -1.5};

static double pick_factor(uint64_t *random) {
    return factors[random_next(random) % (sizeof factors / sizeof *factors)];
}

size_t packing_footprint(size_t d, size_t ld) {
    return d ? (d - 1) * ld + d : 0;
}

void packing_memory_create(packing_memory *m, size_t most_d) {
    const size_t matrix = packing_footprint(most_d, most_d + MOST_GAP);
    arrays_create(&m->packed, of_packed_elements(most_d) * sizeof(double));
    arrays_create(&m->matrix, matrix * sizeof(double));
}

void packing_memory_destroy(packing_memory *m) {
    arrays_destroy(&m->packed);
    arrays_destroy(&m->matrix);
}

static void place(packing_memory *m, of_dtype dtype, size_t d, size_t ld, uint64_t *random) {
    arrays_place(&m->packed, dtype, of_packed_elements(d), 0, random);
    arrays_place(&m->matrix, dtype, packing_footprint(d, ld), 0, random);
}

static bool same(const packing_memory *a, const packing_memory *b) {
    int array = 0;
    size_t element = 0;
    return arrays_differ(&a->packed, &b->packed, &array, &element) == 0 &&
           arrays_differ(&a->matrix, &b->matrix, &array, &element) == 0 &&
           arrays_intact(&a->packed) && arrays_intact(&a->matrix);
}

static void run_all(const of_packing_row *row, packing_memory *m, size_t d, size_t ld,
                    const double numbers[4]) {
    row->add(m->packed.at[TO], m->matrix.at[TO], d, ld, numbers[0]);
    row->merge(m->packed.at[TO], m->packed.at[FROM], of_packed_elements(d), numbers[1], numbers[2]);
    row->unpack(m->matrix.at[TO], m->packed.at[FROM], d, ld, numbers[3]);
}

bool packing_row_agrees(const of_packing_row *row, packing_memory *mine, packing_memory *theirs,
                        size_t d, size_t ld, uint64_t *random) {
    double numbers[4];
    for (int i = 0; i < 4; i++)
        numbers[i] = pick_factor(random);
    place(mine, row->dtype, d, ld, random);
    place(theirs, row->dtype, d, ld, random);
    arrays_fill(&theirs->packed, random);
    arrays_fill(&theirs->matrix, random);
    arrays_copy(&mine->packed, &theirs->packed);
    arrays_copy(&mine->matrix, &theirs->matrix);
    run_all(of_packing_find(row->dtype, OF_ISA_C), theirs, d, ld, numbers);
    run_all(row, mine, d, ld, numbers);
    return same(mine, theirs);
}
