/* SPDX-License-Identifier: BSD-3-Clause */
/* table.c: the rules and the kernels as const rows. */
#include <string.h>

#include "kernels.h"
#include "rules/adam.h"
#include "rules/sgd.h"

static const char *const adam_state[] = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
static const char *const adam_hyper[] = {"lr",           "beta1",   "beta2",    "eps",
                                         "weight_decay", "amsgrad", "maximize", "decoupled"};
static const char *const sgd_state[] = {"momentum_buffer"};
static const char *const sgd_hyper[] = {"lr",           "momentum", "dampening",
                                        "weight_decay", "nesterov", "maximize"};

_Static_assert(sizeof adam_state / sizeof *adam_state == ADAM_N_STATE, "names of adam's state");
_Static_assert(sizeof adam_hyper / sizeof *adam_hyper == ADAM_N_HYPER, "names of adam's options");
_Static_assert(sizeof sgd_state / sizeof *sgd_state == SGD_N_STATE, "names of sgd's state");
_Static_assert(sizeof sgd_hyper / sizeof *sgd_hyper == SGD_N_HYPER, "names of sgd's options");
_Static_assert((int)ADAM_N_HYPER <= (int)OF_MAX_HYPER && sizeof(adam_scalars) <= OF_MAX_SCALARS,
               "adam fits");
_Static_assert((int)SGD_N_HYPER <= (int)OF_MAX_HYPER && sizeof(sgd_scalars) <= OF_MAX_SCALARS,
               "sgd fits");
_Static_assert(sizeof(of_cuda_scalars) <= OF_MAX_SCALARS, "the scalars of the CUDA rows fit");

static unsigned no_state_used(const double *hyper) {
    (void)hyper;
    return 0;
}

static void prepare_nothing(const double *hyper, of_count *count, void *scalars) {
    (void)hyper;
    (void)count;
    (void)scalars;
}

const of_rule of_rules[] = {
    {"adam", adam_state, ADAM_N_STATE, adam_hyper, ADAM_N_HYPER, sizeof(adam_scalars),
     adam_state_used, adam_prepare, true, NULL, 0, false},
    {"sgd", sgd_state, SGD_N_STATE, sgd_hyper, SGD_N_HYPER, sizeof(sgd_scalars), sgd_state_used,
     sgd_prepare, false, NULL, 0, false},
    /* Any optimizer whose own code is run on one parameter; its state is the host's business. */
    {.name = "own", .state_used = no_state_used, .prepare = prepare_nothing, .by_host = true},
    {0},
};

const of_rule *of_rule_find(const char *name) {
    for (const of_rule *rule = of_rules; rule->name; rule++)
        if (strcmp(rule->name, name) == 0)
            return rule;
    return NULL;
}

#if defined(__x86_64__)
#define OF_ISAS(X, ...)                                                                            \
    X(__VA_ARGS__, c, OF_ISA_C)                                                                    \
    X(__VA_ARGS__, baseline, OF_ISA_BASELINE)                                                      \
    X(__VA_ARGS__, avx2, OF_ISA_AVX2)                                                              \
    X(__VA_ARGS__, avx512, OF_ISA_AVX512)
#else
#define OF_ISAS(X, ...)                                                                            \
    X(__VA_ARGS__, c, OF_ISA_C)                                                                    \
    X(__VA_ARGS__, baseline, OF_ISA_BASELINE)
#endif

/* The yardstick of the CUDA kernels; it runs on the CPU. */
#define OF_CUDA_ROWS(X, rule)                                                                      \
    X(rule, float32, OF_FLOAT32)                                                                   \
    X(rule, float64, OF_FLOAT64)                                                                   \
    X(rule, bfloat16, OF_BFLOAT16)                                                                 \
    X(rule, float16, OF_FLOAT16)

#define OF_DTYPES(X, rule)                                                                         \
    OF_ISAS(X, rule, float32, OF_FLOAT32)                                                          \
    OF_ISAS(X, rule, float64, OF_FLOAT64)                                                          \
    OF_ISAS(X, rule, bfloat16, OF_BFLOAT16)                                                        \
    OF_ISAS(X, rule, float16, OF_FLOAT16)

#define OF_RULES(X)                                                                                \
    OF_DTYPES(X, adam)                                                                             \
    OF_DTYPES(X, sgd)

#define OF_DECLARE(rule, dtype, dtype_code, isa, isa_code)                                         \
    of_kernel_fn of_##rule##_##dtype##_##isa##_fused;                                              \
    of_kernel_fn of_##rule##_##dtype##_##isa##_plain;

#define OF_ROWS(rule, dtype, dtype_code, isa, isa_code)                                            \
    {#rule, OF_REF_CPU_FUSED, dtype_code, OF_CPU, isa_code, of_##rule##_##dtype##_##isa##_fused},  \
        {#rule,      OF_REF_CPU_FUSED_PLAIN,                                                       \
         dtype_code, OF_CPU,                                                                       \
         isa_code,   of_##rule##_##dtype##_##isa##_plain},

#define OF_DECLARE_CUDA(rule, dtype, dtype_code) of_kernel_fn of_##rule##_##dtype##_c_cuda;

#define OF_CUDA_ROW(rule, dtype, dtype_code)                                                       \
    {#rule, OF_REF_CUDA_FUSED, dtype_code, OF_CPU, OF_ISA_C, of_##rule##_##dtype##_c_cuda},

OF_RULES(OF_DECLARE)
OF_CUDA_ROWS(OF_DECLARE_CUDA, adam)
OF_CUDA_ROWS(OF_DECLARE_CUDA, sgd)

const of_kernel of_kernels[] = {OF_RULES(OF_ROWS) OF_CUDA_ROWS(OF_CUDA_ROW, adam) OF_CUDA_ROWS(
    OF_CUDA_ROW, sgd){NULL, OF_REF_COUNT, OF_DTYPE_COUNT, OF_CPU, OF_ISA_C, NULL}};

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

size_t of_dtype_size(of_dtype dtype) {
    static const size_t sizes[OF_DTYPE_COUNT] = {4, 8, 2, 2};
    return sizes[dtype];
}

const char *of_dtype_name(of_dtype dtype) {
    static const char *const names[OF_DTYPE_COUNT] = {"float32", "float64", "bfloat16", "float16"};
    return names[dtype];
}

size_t of_tail(of_reference reference, of_dtype dtype, size_t vector_bytes, size_t numel) {
    if (reference == OF_REF_CUDA_FUSED)
        return numel % 4 ? numel : 0;
    /* Both others have the same shape: whole vectors, then the rest. */
    const size_t width = vector_bytes < 32 ? vector_bytes : 32;
    const size_t lanes = width / of_dtype_size(dtype);
    return lanes > 1 ? numel % lanes : 0;
}
