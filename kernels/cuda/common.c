/* SPDX-License-Identifier: BSD-3-Clause */
/* common.c: what a table says about all its tensors. */
#include <string.h>

#include "launch.h"
#include "rules/op_by_op.h"
#include "rules/scaling.h"

typedef struct rule {
    const char *name;
    size_t bytes; /* of its options, or of its prepared scalars */
    unsigned (*state_used)(const double *hyper);
    bool prepared;
    bool runs_programs;
    uint8_t numbers; /* that each tensor has on the device */
    uint8_t state_bytes; /* of an element of the state; 0: as of the parameter */
} rule;

/* All prepared scalars begin in one way. */
static unsigned variant_of(const double *prepared) {
    op_by_op_scalars common;
    memcpy(&common, prepared, sizeof common);
    return common.variant;
}

/* The part of a row that depends on the kind of its kernels. */
#define OF_USED_FUSED(rule)
#define OF_USED_OP_BY_OP(rule)                                                                     \
    static unsigned rule##_used(const double *prepared) {                                          \
        return rule##_variant_state(variant_of(prepared));                                         \
    }
#define OF_USED_PROGRAM(rule)                                                                      \
    static unsigned rule##_used(const double *hyper) {                                             \
        (void)hyper;                                                                               \
        return (1u << OF_MAX_STATE) - 1u;                                                          \
    }
#define OF_USED_ROUNDED(rule)
#define OF_USED_NONE(rule)
#define OF_ROW_NONE(rule, RULE, form, numbers)
#define OF_ROW_FUSED(rule, RULE, form, numbers)                                                    \
    {#rule, RULE##_N_OPTIONS * sizeof(double), rule##_state_used, false, false, 0, 0},
#define OF_ROW_OP_BY_OP(rule, RULE, form, numbers)                                                 \
    {#rule, sizeof(form##_scalars), rule##_used, true, false, numbers, 0},
#define OF_ROW_ROUNDED(rule, RULE, form, numbers)                                                  \
    {#rule, sizeof(rule##_scalars), rule##_state_used, true, false, 0, 0},
#define OF_ROW_PROGRAM(rule, RULE, form, numbers) {#rule, 0, rule##_used, true, true, 0, 0},
#define OF_NUMBERS_UNCOUNTED(RULE) 0
#define OF_NUMBERS_COUNTED(RULE) 0
#define OF_NUMBERS_COUNTED_ON_GPU(RULE) RULE##_N_COUNTERS

#define OF_RULE(rule, RULE, cpu, gpu, form, steps) OF_USED_##gpu(rule)
#include "rules.def"

/* kernels.h has such a table too; this library has to stand alone. */
static const rule rules[] = {
#define OF_RULE(rule, RULE, cpu, gpu, form, steps)                                                 \
    OF_ROW_##gpu(rule, RULE, form, OF_NUMBERS_##steps(RULE))
#include "rules.def"
    {"scaling", 0, scaling_state_used, false, false, 0, 0},
    {"adam_mixed", ADAM_N_OPTIONS * sizeof(double), adam_state_used, false, false, 0,
     sizeof(uint16_t)},
};

const char *of_cuda_rules(void) {
    return
#define OF_RULE(rule, RULE, cpu, gpu, form, steps) OF_TEXT(rule, RULE, cpu, steps)
#include "rules.def"
        ;
}

of_cuda_status of_cuda_rule(const of_gpu_update *update, of_cuda_state *state,
                            of_cuda_common *common, bool early) {
    memset(common, 0, sizeof *common);
    common->lr_at = update->lr_at;
    common->grad_scale_at = update->grad_scale_at;
    common->found_inf_at = update->found_inf_at;
    common->factor_at = update->factor_at;
    common->early = early;
    common->wide_state = update->wide_state;
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        const rule *known = &rules[i];
        if (strcmp(known->name, update->rule) != 0)
            continue;
        if (known->prepared && (update->lr_at || update->grad_scale_at || update->found_inf_at))
            return of_cuda_fail(OF_CUDA_INVALID, "%s takes no scalars on the device", known->name);
        memcpy(common->hyper, update->hyper, known->bytes);
        common->numbers = known->numbers;
        common->runs_programs = known->runs_programs;
        state->used = known->state_used(update->hyper);
        state->bytes = known->state_bytes    ? known->state_bytes
                       : update->wide_state ? sizeof(float)
                                            : of_dtype_size(update->dtype);
        return OF_CUDA_OK;
    }
    return of_cuda_fail(OF_CUDA_UNSUPPORTED, "no CUDA kernels for the rule %s", update->rule);
}
