/* SPDX-License-Identifier: BSD-3-Clause */
/* lists.h: what is made of a rule's lists. A rule's header writes the names of its state
 * tensors, options and counters down once, in the order of the arrays:
 *
 *   #define LION_STATE(X) X(lion, exp_avg)
 *   #define LION_OPTIONS(X) X(lion, lr) X(lion, beta1) ...
 *   #define LION_COUNTERS(X)
 *   OF_ENUMERATE(LION);
 *
 * and has lion_exp_avg, lion_lr, ... as indices. The table of rules has the names from the
 * same lists: a name and its index can't differ. */
#ifndef OPTFUSE_RULES_LISTS_H
#define OPTFUSE_RULES_LISTS_H

#define OF_INDEX(rule, name) rule##_##name,
#define OF_ENUMERATE(RULE)                                                                            \
    enum { RULE##_STATE(OF_INDEX) RULE##_N_STATE };                                                \
    enum { RULE##_OPTIONS(OF_INDEX) RULE##_N_OPTIONS };                                            \
    enum { RULE##_COUNTERS(OF_INDEX) RULE##_N_COUNTERS }

/* For a rule that uses all of its state tensors, whatever its options. */
#define OF_USES_ALL_STATE(rule, RULE)                                                              \
    OF_RULE_FN unsigned rule##_variant_state(unsigned variant) {                                   \
        (void)variant;                                                                             \
        return (1u << RULE##_N_STATE) - 1u;                                                        \
    }                                                                                              \
    static inline unsigned rule##_state_used(const double *hyper) {                                \
        (void)hyper;                                                                               \
        return (1u << RULE##_N_STATE) - 1u;                                                        \
    }

/* The table as text, one line a rule: NAME:CPU:STEPS:STATE:OPTIONS:COUNTERS, each of the last
 * three a list of words. */
#define OF_WORD(rule, name) " " #name
#define OF_TEXT(rule, RULE, cpu, steps)                                                            \
    #rule ":" #cpu ":" #steps ":" RULE##_STATE(OF_WORD) ":" RULE##_OPTIONS(OF_WORD) ":"            \
        RULE##_COUNTERS(OF_WORD) "\n"

#endif
