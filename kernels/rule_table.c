/* SPDX-License-Identifier: BSD-3-Clause */
/* rule_table.c: the rules as const rows, made of rules.def. */
#include <string.h>

#include "kernels.h"
#include "rules/lists.h"

/* The part of a row that depends on the kind of its kernels: the checks, and the fields. */
#define OF_FITS_KERNELS(rule, RULE)                                                                \
    _Static_assert(sizeof(rule##_scalars) <= OF_MAX_SCALARS, "scalars of " #rule);
#define OF_FITS_FUSED OF_FITS_KERNELS
#define OF_FITS_OP_BY_OP OF_FITS_KERNELS
#define OF_FITS_PROGRAM OF_FITS_KERNELS
#define OF_FITS_ROUNDED OF_FITS_KERNELS
#define OF_FITS_GPU_FUSED(form)
#define OF_FITS_GPU_OP_BY_OP(form)                                                                 \
    _Static_assert(sizeof(form##_scalars) <= OF_MAX_HYPER * sizeof(double), "scalars of " #form);
#define OF_FITS_GPU_ROUNDED OF_FITS_GPU_OP_BY_OP
#define OF_FITS_GPU_PROGRAM(form)
#define OF_FITS_GPU_NONE(form)

#define OF_KERNELS(rule)                                                                           \
    .scalars_size = sizeof(rule##_scalars), .state_used = rule##_state_used,                       \
    .prepare = rule##_prepare
#define OF_IS_FUSED(rule, RULE) OF_KERNELS(rule)
#define OF_IS_ROUNDED(rule, RULE) OF_KERNELS(rule), .rounds = true
#define OF_IS_OP_BY_OP(rule, RULE) OF_KERNELS(rule), .op_by_op = true, .n_roots = RULE##_ROOTS
#define OF_IS_PROGRAM(rule, RULE)                                                                  \
    .scalars_size = sizeof(rule##_scalars), .state_used = no_state_used,                           \
    .prepare = prepare_nothing, .op_by_op = true, .runs_programs = true
#define OF_GPU_FUSED(form) NULL
#define OF_GPU_OP_BY_OP(form) form##_prepare
#define OF_GPU_ROUNDED OF_GPU_OP_BY_OP
#define OF_GPU_PROGRAM(form) NULL
#define OF_GPU_NONE(form) NULL
enum { OF_UNCOUNTED, OF_COUNTED, OF_COUNTED_ON_GPU };

/* The names of a rule, each list ended by NULL. */
#define OF_NAME(rule, name) #name,
#define OF_RULE(rule, RULE, cpu, gpu, form, steps)                                                 \
    static const char *const rule##_state[] = {RULE##_STATE(OF_NAME) NULL};                        \
    static const char *const rule##_hyper[] = {RULE##_OPTIONS(OF_NAME) NULL};                      \
    static const char *const rule##_counters[] = {RULE##_COUNTERS(OF_NAME) NULL};                  \
    _Static_assert((int)RULE##_N_STATE <= (int)OF_MAX_STATE, "state of " #rule);                   \
    _Static_assert((int)RULE##_N_OPTIONS <= (int)OF_MAX_HYPER, "options of " #rule);               \
    _Static_assert((int)RULE##_N_COUNTERS <= (int)OF_MAX_COUNTERS, "counters of " #rule);          \
    OF_FITS_##cpu(rule, RULE) OF_FITS_GPU_##gpu(form)
#include "rules.def"

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
#define OF_RULE(rule, RULE, cpu, gpu, form, steps)                                                 \
    {.name = #rule,                                                                                \
     .state = rule##_state,                                                                        \
     .n_state = RULE##_N_STATE,                                                                    \
     .hyper = rule##_hyper,                                                                        \
     .n_hyper = RULE##_N_OPTIONS,                                                                  \
     .counters = rule##_counters,                                                                  \
     .n_counters = RULE##_N_COUNTERS,                                                              \
     OF_IS_##cpu(rule, RULE),                                                                      \
     .prepare_gpu = OF_GPU_##gpu(form),                                                            \
     .counts = OF_##steps != OF_UNCOUNTED,                                                         \
     .counts_on_gpu = OF_##steps == OF_COUNTED_ON_GPU},
#include "rules.def"
    {0},
};

#define OF_RULE(rule, RULE, cpu, gpu, form, steps) OF_TEXT(rule, RULE, cpu, steps)
const char of_rules_text[] =
#include "rules.def"
    ;

const of_rule *of_rule_find(const char *name) {
    for (const of_rule *rule = of_rules; rule->name; rule++)
        if (strcmp(rule->name, name) == 0)
            return rule;
    return NULL;
}

bool of_rule_takes_roots(const of_rule *rule, const double *hyper, double step) {
    if (strcmp(rule->name, "radam") == 0)
        return radam_rectification(hyper[radam_beta2], step) != 0.0;
    return rule->n_roots > 0;
}

const char *of_rule_mixed(const of_rule *rule) {
    return strcmp(rule->name, "adam") == 0 ? "adam_mixed" : NULL;
}
