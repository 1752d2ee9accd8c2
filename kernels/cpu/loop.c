/* SPDX-License-Identifier: BSD-3-Clause */
/* loop.c: the loop over the elements, compiled once per rule, dtype and
 * instruction set. It is plain C that the compiler vectorizes: options are
 * constants inside a loop, and there is one loop per combination of options. */
#include "cell.h"
#include "instance.h"
#include "narrow_block.h"
#include "non_temporal.h"

typedef struct of_arrays {
    of_stored *param;
    const of_stored *grad;
    of_stored *state[OF_N_STATE];
    bool past_caches; /* where the parameter is stored */
} of_arrays;

/* By what the gradient is multiplied. `scaled` is a constant in every loop:
 * without factors the loops are those of a plain update. */
typedef struct of_factors {
    bool scaled;
    of_real first, second;
} of_factors;

/* Pointers to what is left after the first n elements. */
static of_arrays advance(const of_arrays *arrays, size_t n) {
    of_arrays rest = *arrays;
    rest.param += n;
    rest.grad += n;
    for (int i = 0; i < OF_N_STATE; i++)
        if (rest.state[i])
            rest.state[i] += n;
    return rest;
}

OF_RULE_FN void update_reals(const of_constants *constants, unsigned variant, of_form form,
                             of_factors by, size_t n, of_cell *restrict param,
                             const of_cell *restrict grad, of_cell *const *states) {
    const of_constants k = *constants;
    const unsigned used = OF_RULE_NAME(variant_state)(variant);
    of_cell *state[OF_N_STATE];
    memcpy(state, states, sizeof state);
    OF_NO_ALIAS
    for (size_t i = 0; i < n; i++) {
        of_element e = {of_get(param[i]), of_get(grad[i]), {0}};
        if (by.scaled)
            e.grad = of_multiplied(of_multiplied(e.grad, by.first), by.second);
        for (unsigned j = 0; j < OF_N_STATE; j++)
            if (used & (1u << j))
                e.state[j] = of_get(state[j][i]);
        OF_RULE_NAME(element)(&k, variant, form, &e);
        param[i] = of_put(e.param);
        for (unsigned j = 0; j < OF_N_STATE; j++)
            if (used & (1u << j))
                state[j][i] = of_put(e.state[j]);
    }
}

#if defined(OF_IS_NARROW) && !defined(OF_CONVERTS_IN_LOOPS)

OF_RULE_FN void multiply_block(float *block, float factor) {
    uint16_t stored[OF_BLOCK];
    for (int i = 0; i < OF_BLOCK; i++)
        block[i] *= factor;
    OF_NARROW_BLOCK(stored, block);
    OF_WIDEN_BLOCK(block, stored);
}

/* Widens a block into floats, updates it there, narrows it. */
OF_RULE_FN void update_block(const of_constants *k, unsigned variant, of_form form, of_factors by,
                             const of_arrays *arrays, size_t at) {
    _Alignas(64) float param[OF_BLOCK], grad[OF_BLOCK], state[OF_N_STATE][OF_BLOCK];
    const unsigned used = OF_RULE_NAME(variant_state)(variant);
    OF_WIDEN_BLOCK(param, arrays->param + at);
    OF_WIDEN_BLOCK(grad, arrays->grad + at);
    if (by.scaled) {
        multiply_block(grad, by.first);
        multiply_block(grad, by.second);
    }
    for (unsigned i = 0; i < OF_N_STATE; i++)
        if (used & (1u << i))
            OF_WIDEN_BLOCK(state[i], arrays->state[i] + at);
    float *states[OF_N_STATE];
    for (unsigned i = 0; i < OF_N_STATE; i++)
        states[i] = state[i];
    const of_factors done = {false, 1, 1};
    update_reals(k, variant, form, done, OF_BLOCK, param, grad, states);
    if (arrays->past_caches) {
        of_stored narrow[OF_BLOCK];
        OF_NARROW_BLOCK(narrow, param);
        of_store_past_caches(arrays->param + at, narrow, sizeof narrow);
    } else {
        OF_NARROW_BLOCK(arrays->param + at, param);
    }
    for (unsigned i = 0; i < OF_N_STATE; i++)
        if (used & (1u << i))
            OF_NARROW_BLOCK(arrays->state[i] + at, state[i]);
}

/* Less than a block: updates a copy that is padded with zeros. One function
 * for all variants, or it would be most of the code. */
__attribute__((noinline)) static void update_rest(const of_constants *k, unsigned variant,
                                                  of_form form, of_factors by,
                                                  const of_arrays *arrays, size_t at, size_t n) {
    uint16_t param[OF_BLOCK] = {0}, grad[OF_BLOCK] = {0}, state[OF_N_STATE][OF_BLOCK] = {{0}};
    of_arrays padded = {param, grad, {NULL}, false};
    const unsigned used = OF_RULE_NAME(variant_state)(variant);
    memcpy(param, arrays->param + at, n * sizeof *param);
    memcpy(grad, arrays->grad + at, n * sizeof *grad);
    for (unsigned i = 0; i < OF_N_STATE; i++) {
        padded.state[i] = state[i];
        if (used & (1u << i))
            memcpy(state[i], arrays->state[i] + at, n * sizeof *state[i]);
    }
    update_block(k, variant, form, by, &padded, 0);
    memcpy(arrays->param + at, param, n * sizeof *param);
    for (unsigned i = 0; i < OF_N_STATE; i++)
        if (used & (1u << i))
            memcpy(arrays->state[i] + at, state[i], n * sizeof *state[i]);
}

OF_RULE_FN void update_array(const of_constants *k, unsigned variant, of_form form, of_factors by,
                             const of_arrays *arrays, size_t n) {
    size_t at = 0;
    for (; at + OF_BLOCK <= n; at += OF_BLOCK)
        update_block(k, variant, form, by, arrays, at);
    if (at < n)
        update_rest(k, variant, form, by, arrays, at, n - at);
}

#else

OF_RULE_FN void update_in_place(const of_constants *k, unsigned variant, of_form form,
                                of_factors by, const of_arrays *arrays, size_t n) {
    update_reals(k, variant, form, by, n, arrays->param, arrays->grad, arrays->state);
}

/* Compilers have no such stores for a loop that they vectorize. So one block at a time is
 * updated, which stays in registers, and then stored. */
OF_RULE_FN void update_past_caches(const of_constants *k, unsigned variant, of_form form,
                                   of_factors by, const of_arrays *arrays, size_t n) {
    of_arrays rest = *arrays;
    for (; n >= OF_BLOCK; n -= OF_BLOCK) {
        _Alignas(64) of_cell param[OF_BLOCK];
        memcpy(param, rest.param, sizeof param);
        update_reals(k, variant, form, by, OF_BLOCK, param, rest.grad, rest.state);
        of_store_past_caches(rest.param, param, sizeof param);
        rest = advance(&rest, OF_BLOCK);
    }
    update_in_place(k, variant, form, by, &rest, n);
}

/* Factors come with forward fusion, which uses the parameter at once. */
OF_RULE_FN void update_array(const of_constants *k, unsigned variant, of_form form, of_factors by,
                             const of_arrays *arrays, size_t n) {
    if (arrays->past_caches && !by.scaled)
        update_past_caches(k, variant, form, by, arrays, n);
    else
        update_in_place(k, variant, form, by, arrays, n);
}

#endif

/* One loop per variant. */
OF_RULE_FN void update_body(const void *scalars, of_form form, of_factors by,
                            const of_arrays *arrays, size_t n) {
    const of_constants k = OF_RULE_NAME(round)(scalars, form);
    switch (OF_RULE_NAME(variant)(scalars)) {
#define OF_CASE(constant)                                                                          \
    case constant:                                                                                 \
        update_array(&k, constant, form, by, arrays, n);                                           \
        break;
        OF_VARIANTS(OF_CASE)
#undef OF_CASE
    default:
        break;
    }
}

/* A few elements, less than one vector of the reference: one loop for all. */
OF_RULE_FN void update_tail(const void *scalars, of_form form, of_factors by,
                            const of_arrays *arrays, size_t n) {
    const of_constants k = OF_RULE_NAME(round)(scalars, form);
    update_array(&k, OF_RULE_NAME(variant)(scalars), form, by, arrays, n);
}

OF_RULE_FN void update_scaled(const void *scalars, of_form form, of_factors by,
                              const of_arrays *arrays, size_t n) {
    const of_factors scaled = {true, by.first, by.second};
    update_body(scalars, form, scaled, arrays, n);
}

OF_RULE_FN of_factors factors_of(const of_span *span) {
    of_factors by = {span->factors != NULL, 1, 1};
    if (by.scaled) {
        by.first = (of_real)span->factors[0];
        by.second = (of_real)span->factors[1];
    }
    return by;
}

OF_RULE_FN void update_span(const of_span *span, const void *scalars, bool fused) {
    const of_form vectors = OF_BODY(fused), tail = OF_TAIL(fused);
    const of_form form = OF_ALL_TAIL ? tail : vectors;
    const of_factors none = {false, 1, 1}, by = factors_of(span);
    of_arrays arrays = {span->param, span->grad, {NULL}, of_goes_past_caches(span)};
    for (int i = 0; i < OF_N_STATE; i++)
        arrays.state[i] = span->state[i];
    const size_t body = OF_ALL_TAIL ? span->n : span->n - span->tail;
    if (by.scaled)
        update_scaled(scalars, form, by, &arrays, body);
    else
        update_body(scalars, form, none, &arrays, body);
    if (body < span->n) {
        of_arrays rest = advance(&arrays, body);
        rest.past_caches = false; /* it begins anywhere */
        update_tail(scalars, tail, by, &rest, span->n - body);
    }
    if (arrays.past_caches)
        of_end_stores_past_caches();
}

void OF_KERNEL_NAME(fused)(const of_span *span, const void *scalars) {
    update_span(span, scalars, true);
}

void OF_KERNEL_NAME(plain)(const of_span *span, const void *scalars) {
    update_span(span, scalars, false);
}
