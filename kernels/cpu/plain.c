/* SPDX-License-Identifier: BSD-3-Clause */
/* plain.c: the yardstick: one element at a time, nothing to vectorize. Every
 * other row of the table is compared with this one. */
#include "instance.h"
#include "narrow.h"

static of_real load(const of_stored *from) {
#ifdef OF_IS_NARROW
    return OF_PASTE(of, OF_PASTE(OF_DTYPE, widen))(*from);
#else
    return *from;
#endif
}

static void store(of_stored *to, of_real value) {
#ifdef OF_IS_NARROW
    *to = OF_PASTE(of, OF_PASTE(OF_DTYPE, narrow))(value);
#else
    *to = value;
#endif
}

/* The gradient as it would lie in memory after each product. */
static of_real load_gradient(const of_span *span, size_t at) {
    of_stored stored = ((const of_stored *)span->grad)[at];
    for (int i = 0; span->factors && i < 2; i++)
        store(&stored, load(&stored) * (of_real)span->factors[i]);
    return load(&stored);
}

static void update_one(const of_span *span, const void *scalars, of_form form, size_t at) {
    const of_constants k = OF_RULE_NAME(round)(scalars, form);
    const unsigned variant = OF_RULE_NAME(variant)(scalars);
    const unsigned used = OF_RULE_NAME(variant_state)(variant);
    of_stored *param = (of_stored *)span->param + at;
    of_element e = {load(param), load_gradient(span, at), {0}};
    for (unsigned i = 0; i < OF_MAX_STATE; i++)
        if (used & (1u << i))
            e.state[i] = load((const of_stored *)span->state[i] + at);
    OF_RULE_NAME(element)(&k, variant, form, &e);
    store(param, e.param);
    for (unsigned i = 0; i < OF_MAX_STATE; i++)
        if (used & (1u << i))
            store((of_stored *)span->state[i] + at, e.state[i]);
}

static void update_span(const of_span *span, const void *scalars, bool fused) {
    for (size_t i = 0; i < span->n; i++) {
        const of_form form = {fused, OF_ALL_TAIL || i >= span->n - span->tail};
        update_one(span, scalars, form, i);
    }
}

void OF_KERNEL_NAME(fused)(const of_span *span, const void *scalars) {
    update_span(span, scalars, true);
}

void OF_KERNEL_NAME(plain)(const of_span *span, const void *scalars) {
    update_span(span, scalars, false);
}
