/* SPDX-License-Identifier: BSD-3-Clause */
/* op_by_op_loop.c: the loop over the elements for rules whose reference is single
 * operators, compiled once per rule, dtype and instruction set. Square roots
 * come from a library, for many elements at once; so a rule has two halves, and
 * the loop works in blocks that stay in the first-level cache in between. */
#include "op_by_op_numbers.h"

static const of_form body_form = OF_BODY(OF_FUSED), tail_form = OF_TAIL(OF_FUSED);

static void scale(of_real *to, const of_numbers *x, const double *factors) {
    const double first = factors[0], second = factors[1];
    const of_real *from = x->grad;
    const size_t n = count(x);
    OF_NO_ALIAS
    for (size_t i = 0; i < n; i++)
        to[i] = aten_mul_number(aten_mul_number(from[i], first), second);
}

static void negate(of_real *to, const of_numbers *x) {
    const of_real *from = x->grad;
    const size_t n = count(x);
    OF_NO_ALIAS
    for (size_t i = 0; i < n; i++)
        to[i] = -from[i];
}

OF_RULE_FN void decay(of_real *to, const of_numbers *x, of_form form, double weight_decay) {
    const of_real *from = x->grad, *param = x->param;
    const size_t n = count(x);
    OF_NO_ALIAS
    for (size_t i = 0; i < n; i++)
        to[i] = aten_add(form, from[i], param[i], weight_decay);
}

/* The gradient as the rule gets it. One function for all variants. */
__attribute__((noinline)) static void make_gradient(of_numbers *x, const of_span *span,
                                                    const op_by_op_scalars *s, bool is_tail,
                                                    of_real *room) {
    if (span->factors) {
        scale(room, x, span->factors);
        x->grad = room;
    }
    if (s->maximize) {
        negate(room, x);
        x->grad = room;
    }
    if (s->weight_decay != 0.0) {
        if (is_tail)
            decay(room, x, tail_form, s->weight_decay);
        else
            decay(room, x, body_form, s->weight_decay);
        x->grad = room;
    }
}

OF_RULE_FN of_element read(const of_numbers *x, unsigned used, size_t i) {
    of_element e = {x->param[i], x->grad[i], {0}};
    for (unsigned k = 0; k < OF_N_STATE; k++)
        if (used & (1u << k))
            e.state[k] = x->state[k][i];
    return e;
}

OF_RULE_FN void write(const of_numbers *x, unsigned used, size_t i, const of_element *e) {
    x->param[i] = e->param;
    for (unsigned k = 0; k < OF_N_STATE; k++)
        if (used & (1u << k))
            x->state[k][i] = e->state[k];
}

#if OF_ROOTS
OF_RULE_FN void take_roots(const of_span *span, const of_scalars *scalars, unsigned variant,
                           of_form form, const of_numbers *numbers, of_real *roots) {
    const of_numbers x = *numbers;
    const of_scalars s = *scalars;
    const unsigned used = OF_RULE_NAME(variant_state)(variant);
    const size_t n = count(&x);
    OF_NO_ALIAS
    for (size_t i = 0; i < n; i++) {
        of_element e = read(&x, used, i);
        of_real root[OF_ROOTS];
        OF_RULE_NAME(radicand)(&s, variant, form, &e, root);
        write(&x, used, i, &e);
        for (int k = 0; k < OF_ROOTS; k++)
            roots[(size_t)k * n + i] = root[k];
    }
    of_take_roots(span, roots, OF_ROOTS * n);
}
#endif

OF_RULE_FN void finish(const of_scalars *scalars, unsigned variant, of_form form,
                       const of_numbers *numbers, const of_real *roots) {
    const of_numbers x = *numbers;
    const of_scalars s = *scalars;
    const unsigned used = OF_RULE_NAME(variant_state)(variant);
    const size_t n = count(&x);
    OF_NO_ALIAS
    for (size_t i = 0; i < n; i++) {
        of_element e = read(&x, used, i);
        of_real root[OF_ROOM] = {0};
        for (int k = 0; k < OF_ROOTS; k++)
            root[k] = roots[(size_t)k * n + i];
        OF_RULE_NAME(element)(&s, variant, form, &e, root);
        write(&x, used, i, &e);
    }
}

OF_RULE_FN void update_block(const of_span *span, const of_scalars *s, unsigned variant,
                             of_form form, size_t at, size_t n) {
    const unsigned used = OF_RULE_NAME(variant_state)(variant);
    of_room room;
    of_numbers x = load(span, used, at, n, &room);
    make_gradient(&x, span, &s->common, form.tail, room.grad);
#if OF_ROOTS
    take_roots(span, s, variant, form, &x, room.roots);
#endif
    finish(s, variant, form, &x, room.roots);
    save(span, used, at, n, &x);
}

OF_RULE_FN void update_blocks(const of_span *span, const of_scalars *s, unsigned variant,
                              of_form form, size_t begin, size_t end) {
    for (size_t at = begin; at < end; at += OF_OP_BY_OP_BLOCK)
        update_block(span, s, variant, form, at,
                     end - at < OF_OP_BY_OP_BLOCK ? end - at : OF_OP_BY_OP_BLOCK);
}

/* One pair of loops per variant. */
OF_RULE_FN void update_body(const of_span *span, const of_scalars *s, of_form form, size_t end) {
    switch (s->common.variant) {
#define OF_CASE(constant)                                                                          \
    case constant:                                                                                 \
        update_blocks(span, s, constant, form, 0, end);                                            \
        break;
        OF_VARIANTS(OF_CASE)
#undef OF_CASE
    default:
        break;
    }
}

/* Few elements: one pair of loops for all variants. */
__attribute__((noinline)) static void update_tail(const of_span *span, const of_scalars *s,
                                                  of_form form, size_t at) {
    of_span tail = *span;
    tail.past_caches = false; /* it begins anywhere */
    update_blocks(&tail, s, s->common.variant, form, at, tail.n);
}

void OF_KERNEL_NAME(OF_REFERENCE)(const of_span *span, const void *scalars) {
    const size_t body = span->n - span->tail;
    update_body(span, scalars, body_form, body);
    if (span->tail)
        update_tail(span, scalars, tail_form, body);
    if (of_goes_past_caches(span))
        of_end_stores_past_caches();
}
