/* SPDX-License-Identifier: BSD-3-Clause */
/* scale_table.c: the rows of scale.h, norm.h and factored.h. */
#include "scale.h"

#include "factored.h"
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

#ifdef __aarch64__
#define OF_NORM_ORDERS(X) X(neon) X(sve128) X(sve256)
#else
#define OF_NORM_ORDERS(X) X(avx2)
#endif
#define OF_NORM_ISAS(X, order)                                                                     \
    X(order, c, OF_ISA_C)                                                                          \
    X(order, baseline, OF_ISA_BASELINE)                                                            \
    OF_AVX2(X(order, avx2, OF_ISA_AVX2))                                                           \
    OF_AVX512(X(order, avx512, OF_ISA_AVX512))                                                     \
    OF_SVE(X(order, sve, OF_ISA_SVE))

#define OF_DECLARE_NORM(order, isa, isa_code) of_norm_fn of_norm_##order##_##isa;
#define OF_DECLARE_NORMS(order) OF_NORM_ISAS(OF_DECLARE_NORM, order)
OF_NORM_ORDERS(OF_DECLARE_NORMS)

#define OF_NAME(order) #order,
const char *const of_norm_orders[] = {OF_NORM_ORDERS(OF_NAME) NULL};

#define OF_NORM_ROW(order, isa, isa_code) [isa_code] = of_norm_##order##_##isa,
#define OF_NORM_ROWS(order) {OF_NORM_ISAS(OF_NORM_ROW, order)},
static of_norm_fn *const norms[][OF_ISA_COUNT] = {OF_NORM_ORDERS(OF_NORM_ROWS)};

of_norm_fn *of_norm_find(size_t order, of_isa isa) {
    size_t best = (size_t)isa;
    while (!norms[order][best])
        best--;
    return norms[order][best];
}

of_largest_fn of_largest_c, of_largest_baseline;
OF_AVX2(of_largest_fn of_largest_avx2;)
OF_AVX512(of_largest_fn of_largest_avx512;)
OF_SVE(of_largest_fn of_largest_sve;)

of_largest_fn *of_largest_find(of_isa isa) {
    OF_SVE(if (isa >= OF_ISA_SVE) return of_largest_sve;)
    OF_AVX512(if (isa >= OF_ISA_AVX512) return of_largest_avx512;)
    OF_AVX2(if (isa >= OF_ISA_AVX2) return of_largest_avx2;)
    return isa >= OF_ISA_BASELINE ? of_largest_baseline : of_largest_c;
}

#define OF_FACTORED_DTYPES(X) X(float32) X(bfloat16) X(float16)
#define OF_DECLARE_FACTORED(dtype, isa, isa_code) of_factored_fn of_factored_##dtype##_##isa;
#define OF_DECLARE_FACTOREDS(dtype) OF_NORM_ISAS(OF_DECLARE_FACTORED, dtype)
OF_FACTORED_DTYPES(OF_DECLARE_FACTOREDS)

#define OF_FACTORED_ROW(dtype, isa, isa_code) [isa_code] = of_factored_##dtype##_##isa,
static of_factored_fn *const factored[OF_DTYPE_COUNT][OF_ISA_COUNT] = {
    [OF_FLOAT32] = {OF_NORM_ISAS(OF_FACTORED_ROW, float32)},
    [OF_BFLOAT16] = {OF_NORM_ISAS(OF_FACTORED_ROW, bfloat16)},
    [OF_FLOAT16] = {OF_NORM_ISAS(OF_FACTORED_ROW, float16)},
};

of_factored_fn *of_factored_find(of_dtype dtype, of_isa isa) {
    size_t best = (size_t)isa;
    while (best != OF_ISA_C && !factored[dtype][best])
        best--;
    return factored[dtype][best];
}
