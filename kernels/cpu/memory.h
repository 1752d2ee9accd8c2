/* SPDX-License-Identifier: BSD-3-Clause */
/* memory.h: one element of an array in memory, as the number that rules compute
 * with. For the yardsticks; loops convert blocks (narrow_block.h). */
#ifndef OPTFUSE_CPU_MEMORY_H
#define OPTFUSE_CPU_MEMORY_H

#include "stored.h"

#include "../rules/real.h"
#include "narrow.h"

OF_RULE_FN of_real of_load(const void *from, size_t at) {
    const of_stored stored = ((const of_stored *)from)[at];
#ifdef OF_IS_NARROW
    return OF_PASTE(of, OF_PASTE(OF_DTYPE, widen))(stored);
#else
    return stored;
#endif
}

OF_RULE_FN void of_store(void *to, size_t at, of_real value) {
#ifdef OF_IS_NARROW
    ((of_stored *)to)[at] = OF_PASTE(of, OF_PASTE(OF_DTYPE, narrow))(value);
#else
    ((of_stored *)to)[at] = value;
#endif
}

/* To the type in memory and back. */
OF_RULE_FN of_real of_as_stored(of_real value) {
    of_stored stored;
    of_store(&stored, 0, value);
    return of_load(&stored, 0);
}

#ifdef OF_STATE_BFLOAT16
OF_RULE_FN of_real of_load_one_state(const void *from, size_t at) {
    return of_bfloat16_widen(((const of_stored_state *)from)[at]);
}

OF_RULE_FN void of_store_one_state(void *to, size_t at, of_real value) {
    ((of_stored_state *)to)[at] = of_bfloat16_narrow(value);
}
#else
OF_RULE_FN of_real of_load_one_state(const void *from, size_t at) {
    return of_load(from, at);
}

OF_RULE_FN void of_store_one_state(void *to, size_t at, of_real value) {
    of_store(to, at, value);
}
#endif

/* The elements of the state that a rule uses. */
OF_RULE_FN void of_load_state(const of_span *span, unsigned used, size_t at, of_element *e) {
    for (unsigned i = 0; i < OF_FORMULA_STATE; i++)
        if (used & (1u << i))
            e->state[i] = of_load_one_state(span->state[i], at);
}

/* Parameter and state. */
OF_RULE_FN void of_store_element(const of_span *span, unsigned used, size_t at,
                                 const of_element *e) {
    of_store(span->param, at, e->param);
    for (unsigned i = 0; i < OF_FORMULA_STATE; i++)
        if (used & (1u << i))
            of_store_one_state(span->state[i], at, e->state[i]);
}

/* The gradient as it would lie in memory after each product. */
OF_RULE_FN of_real of_load_gradient(const of_span *span, size_t at) {
    of_real grad = of_load(span->grad, at);
    for (int i = 0; span->factors && i < 2; i++)
        grad = of_as_stored(grad * (of_real)span->factors[i]);
    return grad;
}

#endif
