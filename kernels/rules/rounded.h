/* SPDX-License-Identifier: BSD-3-Clause */
/* rounded.h: what the rules have in common that compute in float32 whatever is in memory, and round
 * once: a parameter of 16 bits to nearest or stochastically (draws.h), its state, which is float32
 * or lies as the parameter, likewise. Their formulas are sums, products, quotients and roots that
 * are rounded one by one: these have the same bits on every processor. */
#ifndef OPTFUSE_RULES_ROUNDED_H
#define OPTFUSE_RULES_ROUNDED_H

#include "draws.h"

#define OF_ROUNDED_OPTIONS(X, rule)                                                                \
    X(rule, stochastic_rounding) X(rule, stochastic_state) X(rule, seed)

/* The first member of each such rule's scalars. Without padding, because scalars are compared by
 * their bytes. */
typedef struct rounded_scalars {
    uint64_t seed;
    uint32_t step;
    uint16_t param, state; /* whether they are rounded stochastically: not the state alone */
} rounded_scalars;

/* stochastic: where these options begin. */
static inline rounded_scalars rounded_prepare(const double *stochastic, double step) {
    const bool param = stochastic[0] != 0.0;
    const rounded_scalars s = {(uint64_t)stochastic[2], (uint32_t)step, param,
                               param && stochastic[1] != 0.0};
    return s;
}

/* A rule's numbers: in its scalars as double, as they are prepared, and in the type of the
 * computation. NUMBERS(X) has their names. */
#define OF_AS_DOUBLE(name) double name;
#define OF_AS_REAL(name) of_real name;
#define OF_TO_REAL(name) k.name = of_rounded(s->name);
#define OF_ROUNDED_NUMBERS(rule, NUMBERS)                                                          \
    typedef struct rule##_scalars {                                                                \
        rounded_scalars common;                                                                    \
        NUMBERS(OF_AS_DOUBLE)                                                                      \
    } rule##_scalars;                                                                              \
    typedef struct rule##_constants {                                                              \
        NUMBERS(OF_AS_REAL)                                                                        \
    } rule##_constants;                                                                            \
    OF_RULE_FN rule##_constants rule##_round(const void *scalars, of_form form) {                  \
        const rule##_scalars *s = (const rule##_scalars *)scalars;                                 \
        rule##_constants k;                                                                        \
        (void)form;                                                                                \
        NUMBERS(OF_TO_REAL)                                                                        \
        return k;                                                                                  \
    }                                                                                              \
    OF_RULE_FN unsigned rule##_variant(const void *scalars) {                                      \
        (void)scalars;                                                                             \
        return 0;                                                                                  \
    }                                                                                              \
    enum { rule##_narrow_is_scalar = 0 }

#endif
