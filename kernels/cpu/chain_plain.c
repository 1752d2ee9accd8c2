/* SPDX-License-Identifier: BSD-3-Clause */
/* chain_plain.c: the yardstick of the rows that chain_loop.c makes: one element
 * at a time. */
#include "chain_instance.h"

#ifdef OF_IS_NARROW
static of_real load(const void *from, size_t at) {
    return OF_PASTE(of, OF_PASTE(OF_DTYPE, widen))(((const of_stored *)from)[at]);
}
static void store(void *to, size_t at, of_real value) {
    ((of_stored *)to)[at] = OF_PASTE(of, OF_PASTE(OF_DTYPE, narrow))(value);
}
#else
static of_real load(const void *from, size_t at) {
    return ((const of_stored *)from)[at];
}
static void store(void *to, size_t at, of_real value) {
    ((of_stored *)to)[at] = value;
}
#endif

static of_real gradient(const of_span *span, const of_scalars *s, of_form form, size_t at) {
    of_real grad = load(span->grad, at);
    for (int i = 0; span->factors && i < 2; i++)
        grad = aten_mul_number(grad, span->factors[i]);
    if (s->chain.maximize)
        grad = -grad;
    if (s->chain.weight_decay != 0.0)
        grad = aten_add(form, grad, load(span->param, at), s->chain.weight_decay);
    return grad;
}

static void update_one(const of_span *span, const of_scalars *s, of_form form, size_t at) {
    const unsigned variant = s->chain.variant;
    const unsigned used = OF_RULE_NAME(variant_state)(variant);
    of_real roots[OF_ROOM] = {0};
    of_element e = {load(span->param, at), gradient(span, s, form, at), {0}};
    for (unsigned i = 0; i < OF_MAX_STATE; i++)
        if (used & (1u << i))
            e.state[i] = load(span->state[i], at);
#if OF_ROOTS
    OF_RULE_NAME(radicand)(s, variant, form, &e, roots);
    of_take_roots(span, roots, OF_ROOTS);
#endif
    OF_RULE_NAME(element)(s, variant, form, &e, roots);
    store(span->param, at, e.param);
    for (unsigned i = 0; i < OF_MAX_STATE; i++)
        if (used & (1u << i))
            store(span->state[i], at, e.state[i]);
}

static void update_span(const of_span *span, const void *scalars, bool fused) {
    for (size_t i = 0; i < span->n; i++) {
        const of_form form = {fused, i >= span->n - span->tail};
        update_one(span, scalars, form, i);
    }
}

void OF_KERNEL_NAME(fused)(const of_span *span, const void *scalars) {
    update_span(span, scalars, true);
}

void OF_KERNEL_NAME(plain)(const of_span *span, const void *scalars) {
    update_span(span, scalars, false);
}
