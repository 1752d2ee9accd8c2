/* SPDX-License-Identifier: BSD-3-Clause */
/* loop.c: the loop over the elements, compiled once per rule, dtype and
 * instruction set. It is plain C that the compiler vectorizes: options are
 * constants inside a loop, and there is one loop per combination of options. */
#include "instance.h"
#include "narrow.h"

#if defined(__GNUC__) && !defined(__clang__)
#define OF_NO_ALIAS _Pragma("GCC ivdep")
#else
#define OF_NO_ALIAS
#endif

typedef struct of_arrays {
    of_stored *param;
    const of_stored *grad;
    of_stored *state[OF_MAX_STATE];
} of_arrays;

/* Pointers to what is left after the first n elements. */
static of_arrays advance(const of_arrays *arrays, size_t n)
{
    of_arrays rest = *arrays;
    rest.param += n;
    rest.grad += n;
    for (int i = 0; i < OF_MAX_STATE; i++)
        if (rest.state[i])
            rest.state[i] += n;
    return rest;
}

OF_RULE_FN void update_reals(const of_constants *constants, unsigned variant, of_form form, size_t n,
                             of_real *restrict param, const of_real *restrict grad,
                             of_real *restrict state0, of_real *restrict state1,
                             of_real *restrict state2)
{
    const of_constants k = *constants;
    const unsigned used = OF_RULE_NAME(variant_state)(variant);
    OF_NO_ALIAS
    for (size_t i = 0; i < n; i++) {
        of_element e = {param[i], grad[i], {0}};
        if (used & 1u)
            e.state[0] = state0[i];
        if (used & 2u)
            e.state[1] = state1[i];
        if (used & 4u)
            e.state[2] = state2[i];
        OF_RULE_NAME(element)(&k, variant, form, &e);
        param[i] = e.param;
        if (used & 1u)
            state0[i] = e.state[0];
        if (used & 2u)
            state1[i] = e.state[1];
        if (used & 4u)
            state2[i] = e.state[2];
    }
}

#ifdef OF_IS_NARROW

/* Five blocks of floats stay in the first-level cache. */
enum { BLOCK = 256 };

/* Called, not inlined: a call per block costs nothing and keeps every variant
 * small. */
__attribute__((noinline)) static void widen(float *to, const uint16_t *from, size_t n)
{
    OF_PASTE(of, OF_PASTE(OF_DTYPE, widen_block))(to, from, n);
}

__attribute__((noinline)) static void narrow(uint16_t *to, const float *from, size_t n)
{
    OF_PASTE(of, OF_PASTE(OF_DTYPE, narrow_block))(to, from, n);
}

/* Widens a block into floats on the stack, updates it there, narrows it. */
OF_RULE_FN void update_array(const of_constants *k, unsigned variant, of_form form,
                             const of_arrays *arrays, size_t n)
{
    _Alignas(64) float param[BLOCK], grad[BLOCK], state[OF_MAX_STATE][BLOCK];
    const unsigned used = OF_RULE_NAME(variant_state)(variant);
    for (size_t at = 0; at < n; at += BLOCK) {
        const size_t count = n - at < BLOCK ? n - at : BLOCK;
        widen(param, arrays->param + at, count);
        widen(grad, arrays->grad + at, count);
        for (unsigned i = 0; i < OF_MAX_STATE; i++)
            if (used & (1u << i))
                widen(state[i], arrays->state[i] + at, count);
        update_reals(k, variant, form, count, param, grad, state[0], state[1], state[2]);
        narrow(arrays->param + at, param, count);
        for (unsigned i = 0; i < OF_MAX_STATE; i++)
            if (used & (1u << i))
                narrow(arrays->state[i] + at, state[i], count);
    }
}

#else

OF_RULE_FN void update_array(const of_constants *k, unsigned variant, of_form form,
                             const of_arrays *arrays, size_t n)
{
    update_reals(k, variant, form, n, arrays->param, arrays->grad, arrays->state[0],
                 arrays->state[1], arrays->state[2]);
}

#endif

/* One loop per variant. */
OF_RULE_FN void update_body(const void *scalars, of_form form, const of_arrays *arrays, size_t n)
{
    const of_constants k = OF_RULE_NAME(round)(scalars, form);
    switch (OF_RULE_NAME(variant)(scalars)) {
#define OF_CASE(constant)                                                                          \
    case constant:                                                                                 \
        update_array(&k, constant, form, arrays, n);                                               \
        break;
        OF_VARIANTS(OF_CASE)
#undef OF_CASE
    default:
        break;
    }
}

/* A few elements, less than one vector of the reference: one loop for all. */
OF_RULE_FN void update_tail(const void *scalars, of_form form, const of_arrays *arrays, size_t n)
{
    const of_constants k = OF_RULE_NAME(round)(scalars, form);
    update_array(&k, OF_RULE_NAME(variant)(scalars), form, arrays, n);
}

OF_RULE_FN void update_span(const of_span *span, const void *scalars, bool fused)
{
    const of_form form = {fused, OF_ALL_TAIL}, tail = {fused, true};
    const of_arrays arrays = {span->param, span->grad,
                              {span->state[0], span->state[1], span->state[2]}};
    const size_t body = OF_ALL_TAIL ? span->n : span->n - span->tail;
    update_body(scalars, form, &arrays, body);
    if (body < span->n) {
        const of_arrays rest = advance(&arrays, body);
        update_tail(scalars, tail, &rest, span->n - body);
    }
}

void OF_KERNEL_NAME(fused)(const of_span *span, const void *scalars)
{
    update_span(span, scalars, true);
}

void OF_KERNEL_NAME(plain)(const of_span *span, const void *scalars)
{
    update_span(span, scalars, false);
}
