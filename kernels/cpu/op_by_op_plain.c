/* SPDX-License-Identifier: BSD-3-Clause */
/* op_by_op_plain.c: the yardstick of the rows that op_by_op_loop.c makes: one element
 * at a time. */
#include "op_by_op_instance.h"
#include "memory.h"

static of_real gradient(const of_span *span, const of_scalars *s, of_form form, size_t at) {
    of_real grad = of_load_gradient(span, at);
    if (s->common.maximize)
        grad = -grad;
    if (s->common.weight_decay != 0.0)
        grad = aten_add(form, grad, of_load(span->param, at), s->common.weight_decay);
    return grad;
}

static void update_one(const of_span *span, const of_scalars *s, of_form form, size_t at) {
    const unsigned variant = s->common.variant;
    const unsigned used = OF_RULE_NAME(variant_state)(variant);
    of_real roots[OF_ROOM] = {0};
    of_element e = {of_load(span->param, at), gradient(span, s, form, at), {0}};
    of_load_state(span, used, at, &e);
#if OF_ROOTS
    OF_RULE_NAME(radicand)(s, variant, form, &e, roots);
    of_take_roots(span, roots, OF_ROOTS);
#endif
    OF_RULE_NAME(element)(s, variant, form, &e, roots);
    of_store_element(span, used, at, &e);
}

static void update_span(const of_span *span, const void *scalars, bool fused) {
    const of_form body = OF_BODY(fused), tail = OF_TAIL(fused);
    for (size_t i = 0; i < span->n; i++)
        update_one(span, scalars, i >= span->n - span->tail ? tail : body, i);
}

void OF_KERNEL_NAME(fused)(const of_span *span, const void *scalars) {
    update_span(span, scalars, true);
}

void OF_KERNEL_NAME(plain)(const of_span *span, const void *scalars) {
    update_span(span, scalars, false);
}
