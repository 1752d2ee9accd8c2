/* SPDX-License-Identifier: BSD-3-Clause */
/* plain.c: the yardstick: one element at a time, nothing to vectorize. Every
 * other row of the table is compared with this one. */
#include "instance.h"
#include "memory.h"

static void update_one(const of_span *span, const void *scalars, of_form form, size_t at) {
    const of_constants k = OF_RULE_NAME(round)(scalars, form);
    const unsigned variant = OF_RULE_NAME(variant)(scalars);
    const unsigned used = OF_RULE_NAME(variant_state)(variant);
    of_element e = {of_load(span->param, at), of_load_gradient(span, at), {0}};
    of_load_state(span, used, at, &e);
    OF_RULE_NAME(element)(&k, variant, form, &e);
    of_store_element(span, used, at, &e);
}

static void update_span(const of_span *span, const void *scalars, bool fused) {
    const of_form body = OF_BODY(fused), tail = OF_TAIL(fused);
    for (size_t i = 0; i < span->n; i++)
        update_one(span, scalars, OF_ALL_TAIL || i >= span->n - span->tail ? tail : body, i);
}

void OF_KERNEL_NAME(fused)(const of_span *span, const void *scalars) {
    update_span(span, scalars, true);
}

void OF_KERNEL_NAME(plain)(const of_span *span, const void *scalars) {
    update_span(span, scalars, false);
}
