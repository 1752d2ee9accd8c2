/* SPDX-License-Identifier: BSD-3-Clause */
/* scale_table.c: the rows of scale.h and norm.h. */
#include "scale.h"

#include "isas.h"
#include "norm.h"

#define OF_SCALE_ISAS(X, dtype, code)                                                              \
    X(dtype, code, c, OF_ISA_C)                                                                    \
    X(dtype, code, baseline, OF_ISA_BASELINE)                                                      \
    OF_AVX2(X(dtype, code, avx2, OF_ISA_AVX2))                                                     \
    OF_AVX512(X(dtype, code, avx512, OF_ISA_AVX512))                                               \
    OF_SVE(X(dtype, code, sve, OF_ISA_SVE))
#define OF_SCALES(X)                                                                               \
    OF_SCALE_ISAS(X, float32, OF_FLOAT32)                                                          \
    OF_SCALE_ISAS(X, float64, OF_FLOAT64)                                                          \
    OF_SCALE_ISAS(X, bfloat16, OF_BFLOAT16)                                                        \
    OF_SCALE_ISAS(X, float16, OF_FLOAT16)

#define OF_DECLARE(dtype, code, isa, isa_code) of_scale_fn of_scale_##dtype##_##isa;
#define OF_ROW(dtype, code, isa, isa_code) {code, isa_code, of_scale_##dtype##_##isa},

OF_SCALES(OF_DECLARE)

const of_scale_row of_scale_rows[] = {OF_SCALES(OF_ROW){OF_DTYPE_COUNT, OF_ISA_C, NULL}};

of_scale_fn *of_scale_find(of_dtype dtype, of_isa isa) {
    const of_scale_row *best = NULL;
    for (const of_scale_row *row = of_scale_rows; row->run; row++)
        if (row->dtype == dtype && row->isa <= isa && (!best || row->isa > best->isa))
            best = row;
    return best ? best->run : NULL;
}

of_norm_fn of_norm_c, of_norm_baseline;
OF_AVX2(of_norm_fn of_norm_avx2;)
OF_AVX512(of_norm_fn of_norm_avx512;)
OF_SVE(of_norm_fn of_norm_sve;)

of_norm_fn *of_norm_find(of_isa isa) {
    OF_SVE(if (isa >= OF_ISA_SVE) return of_norm_sve;)
    OF_AVX512(if (isa >= OF_ISA_AVX512) return of_norm_avx512;)
    OF_AVX2(if (isa >= OF_ISA_AVX2) return of_norm_avx2;)
    return isa >= OF_ISA_BASELINE ? of_norm_baseline : of_norm_c;
}
