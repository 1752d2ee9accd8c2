/* SPDX-License-Identifier: BSD-3-Clause */
/* packing_table.c: the rows of packing.h. */
#include "packing.h"

#include "isas.h"

#define OF_PACKING_ISAS(X, dtype, code)                                                            \
    X(dtype, code, c, OF_ISA_C)                                                                    \
    X(dtype, code, baseline, OF_ISA_BASELINE)                                                      \
    OF_AVX2(X(dtype, code, avx2, OF_ISA_AVX2))                                                     \
    OF_AVX512(X(dtype, code, avx512, OF_ISA_AVX512))                                               \
    OF_SVE(X(dtype, code, sve, OF_ISA_SVE))
#define OF_PACKINGS(X)                                                                             \
    OF_PACKING_ISAS(X, float32, OF_FLOAT32)                                                        \
    OF_PACKING_ISAS(X, float64, OF_FLOAT64)

#define OF_DECLARE(dtype, code, isa, isa_code)                                                     \
    of_packing_add_fn of_packing_add_##dtype##_##isa;                                              \
    of_packing_merge_fn of_packing_merge_##dtype##_##isa;                                          \
    of_packing_unpack_fn of_packing_unpack_##dtype##_##isa;
#define OF_ROW(dtype, code, isa, isa_code)                                                         \
    {code, isa_code, of_packing_add_##dtype##_##isa, of_packing_merge_##dtype##_##isa,             \
     of_packing_unpack_##dtype##_##isa},

OF_PACKINGS(OF_DECLARE)

const of_packing_row of_packing_rows[] = {
    OF_PACKINGS(OF_ROW){OF_DTYPE_COUNT, OF_ISA_C, NULL, NULL, NULL}};

const of_packing_row *of_packing_find(of_dtype dtype, of_isa isa) {
    const of_packing_row *best = NULL;
    for (const of_packing_row *row = of_packing_rows; row->add; row++)
        if (row->dtype == dtype && row->isa <= isa && (!best || row->isa > best->isa))
            best = row;
    return best;
}
