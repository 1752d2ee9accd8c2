/* SPDX-License-Identifier: BSD-3-Clause */
/* table.c: the kernels as const rows. */
#include <string.h>

#include "isas.h"
#include "kernels.h"

_Static_assert(sizeof(of_cuda_scalars) <= OF_MAX_SCALARS, "the scalars of the CUDA rows fit");

/* A row for each instruction set, X(..., avx2, OF_ISA_AVX2); and for those of a rule of
 * op_by_op_loop.c, which have a reference only where it occurs. */
#define OF_ISAS(X, ...)                                                                            \
    X(__VA_ARGS__, c, OF_ISA_C)                                                                    \
    X(__VA_ARGS__, baseline, OF_ISA_BASELINE)                                                      \
    OF_AVX2(X(__VA_ARGS__, avx2, OF_ISA_AVX2))                                                     \
    OF_AVX512(X(__VA_ARGS__, avx512, OF_ISA_AVX512))                                               \
    OF_SVE(X(__VA_ARGS__, sve, OF_ISA_SVE))
#define OF_OP_BY_OP_ISAS(X, ...)                                                                   \
    X(__VA_ARGS__, c, OF_ISA_C, fused, OF_REF_CPU_FUSED)                                           \
    X(__VA_ARGS__, c, OF_ISA_C, plain, OF_REF_CPU_FUSED_PLAIN)                                     \
    OF_OP_BY_OP_BASELINE(X, __VA_ARGS__)                                                           \
    OF_AVX2(X(__VA_ARGS__, avx2, OF_ISA_AVX2, fused, OF_REF_CPU_FUSED))                            \
    OF_AVX512(X(__VA_ARGS__, avx512, OF_ISA_AVX512, fused, OF_REF_CPU_FUSED))                      \
    OF_SVE(X(__VA_ARGS__, sve, OF_ISA_SVE, fused, OF_REF_CPU_FUSED))                               \
    OF_SVE(X(__VA_ARGS__, sve, OF_ISA_SVE, plain, OF_REF_CPU_FUSED_PLAIN))

/* AArch64's baseline has fused multiply-adds. */
#ifdef __aarch64__
#define OF_OP_BY_OP_BASELINE(X, ...)                                                               \
    X(__VA_ARGS__, baseline, OF_ISA_BASELINE, fused, OF_REF_CPU_FUSED)
#else
#define OF_OP_BY_OP_BASELINE(X, ...)                                                               \
    X(__VA_ARGS__, baseline, OF_ISA_BASELINE, plain, OF_REF_CPU_FUSED_PLAIN)
#endif

/* X(..., float32, OF_FLOAT32) and the others. */
#define OF_DTYPES(X, ...)                                                                          \
    X(__VA_ARGS__, float32, OF_FLOAT32)                                                            \
    X(__VA_ARGS__, float64, OF_FLOAT64)                                                            \
    X(__VA_ARGS__, bfloat16, OF_BFLOAT16)                                                          \
    X(__VA_ARGS__, float16, OF_FLOAT16)

/* Those of rules that round. */
#define OF_ROUNDED_DTYPES(X, ...)                                                                  \
    X(__VA_ARGS__, float32, OF_FLOAT32)                                                            \
    X(__VA_ARGS__, bfloat16, OF_BFLOAT16)                                                          \
    X(__VA_ARGS__, float16, OF_FLOAT16)

#define OF_DECLARE(rule, dtype, dtype_code, isa, isa_code)                                         \
    of_kernel_fn of_##rule##_##dtype##_##isa##_fused;                                              \
    of_kernel_fn of_##rule##_##dtype##_##isa##_plain;

#define OF_ROWS(rule, dtype, dtype_code, isa, isa_code)                                            \
    {#rule, OF_REF_CPU_FUSED, dtype_code, OF_CPU, isa_code, of_##rule##_##dtype##_##isa##_fused},  \
        {#rule,      OF_REF_CPU_FUSED_PLAIN,                                                       \
         dtype_code, OF_CPU,                                                                       \
         isa_code,   of_##rule##_##dtype##_##isa##_plain},

#define OF_DECLARE_OP_BY_OP(rule, dtype, dtype_code, isa, isa_code, ref, ref_code)                 \
    of_kernel_fn of_##rule##_##dtype##_##isa##_##ref;

#define OF_OP_BY_OP_ROW(rule, dtype, dtype_code, isa, isa_code, ref, ref_code)                     \
    {#rule, ref_code, dtype_code, OF_CPU, isa_code, of_##rule##_##dtype##_##isa##_##ref},

/* The yardsticks of the CUDA kernels; they run on the CPU. */
#define OF_DECLARE_CUDA(rule, dtype, dtype_code) of_kernel_fn of_##rule##_##dtype##_c_cuda;

#define OF_CUDA_ROW(rule, dtype, dtype_code)                                                       \
    {#rule, OF_REF_CUDA_FUSED, dtype_code, OF_CPU, OF_ISA_C, of_##rule##_##dtype##_c_cuda},

#define OF_DECLARE_CUDA_OP_BY_OP(rule, dtype, dtype_code)                                          \
    of_kernel_fn of_##rule##_##dtype##_c_op_by_op;

#define OF_CUDA_OP_BY_OP_ROW(rule, dtype, dtype_code)                                              \
    {#rule, OF_REF_CUDA_OP_BY_OP, dtype_code, OF_CPU, OF_ISA_C, of_##rule##_##dtype##_c_op_by_op},

#define OF_DECLARE_CPU_FUSED(rule) OF_DTYPES(OF_ISAS, OF_DECLARE, rule)
#define OF_DECLARE_CPU_OP_BY_OP(rule) OF_DTYPES(OF_OP_BY_OP_ISAS, OF_DECLARE_OP_BY_OP, rule)
#define OF_DECLARE_CPU_PROGRAM OF_DECLARE_CPU_OP_BY_OP
#define OF_DECLARE_CPU_ROUNDED(rule) OF_ROUNDED_DTYPES(OF_ISAS, OF_DECLARE, rule)
#define OF_DECLARE_GPU_ROUNDED(rule) /* the CPU's have the bits */
#define OF_DECLARE_GPU_NONE(rule)
#define OF_DECLARE_GPU_FUSED(rule) OF_DTYPES(OF_DECLARE_CUDA, rule)
#define OF_DECLARE_GPU_OP_BY_OP(rule) OF_DTYPES(OF_DECLARE_CUDA_OP_BY_OP, rule)
#define OF_DECLARE_GPU_PROGRAM OF_DECLARE_GPU_OP_BY_OP
#define OF_RULE(rule, RULE, cpu, gpu, form, steps)                                                 \
    OF_DECLARE_CPU_##cpu(rule) OF_DECLARE_GPU_##gpu(rule)
#include "rules.def"
OF_DECLARE_CUDA(adam_mixed, float32, OF_FLOAT32)

#define OF_CPU_FUSED(rule) OF_DTYPES(OF_ISAS, OF_ROWS, rule)
#define OF_CPU_OP_BY_OP(rule) OF_DTYPES(OF_OP_BY_OP_ISAS, OF_OP_BY_OP_ROW, rule)
#define OF_CPU_PROGRAM OF_CPU_OP_BY_OP
#define OF_CPU_ROUNDED(rule) OF_ROUNDED_DTYPES(OF_ISAS, OF_ROWS, rule)
#define OF_GPU_ROUNDED(rule)
#define OF_GPU_NONE(rule)
#define OF_GPU_FUSED(rule) OF_DTYPES(OF_CUDA_ROW, rule)
#define OF_GPU_OP_BY_OP(rule) OF_DTYPES(OF_CUDA_OP_BY_OP_ROW, rule)
#define OF_GPU_PROGRAM OF_GPU_OP_BY_OP

/* clang-format off */
const of_kernel of_kernels[] = {
#define OF_RULE(rule, RULE, cpu, gpu, form, steps) OF_CPU_##cpu(rule) OF_GPU_##gpu(rule)
#include "rules.def"
    OF_CUDA_ROW(adam_mixed, float32, OF_FLOAT32)
    {NULL, OF_REF_COUNT, OF_DTYPE_COUNT, OF_CPU, OF_ISA_C, NULL},
};
/* clang-format on */

const of_kernel *of_kernel_find(const char *rule, of_reference reference, of_dtype dtype,
                                of_device device, of_isa isa) {
    const of_kernel *best = NULL;
    for (const of_kernel *row = of_kernels; row->rule; row++) {
        if (strcmp(row->rule, rule) != 0 || row->reference != reference || row->dtype != dtype ||
            row->device != device || row->isa > isa)
            continue;
        if (!best || row->isa > best->isa)
            best = row;
    }
    return best;
}

size_t of_tail(const of_rule *rule, of_reference reference, of_dtype dtype, size_t vector_bytes,
               size_t numel) {
    if (reference == OF_REF_CUDA_OP_BY_OP)
        return 0;
    if (reference == OF_REF_CUDA_FUSED)
        return numel % 4 ? numel : 0;
    /* Both others have the same shape: whole vectors, then the rest. */
    const size_t width = vector_bytes < 32 ? vector_bytes : 32;
    const size_t lanes = (rule->op_by_op ? 2 : 1) * width / of_dtype_size(dtype);
    return lanes > 1 ? numel % lanes : 0;
}
