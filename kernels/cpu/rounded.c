/* SPDX-License-Identifier: BSD-3-Clause */
/* rounded.c: the loop over elements of 16 bits for rules that round once (rules/rounded.h), compiled
 * once per rule, dtype and instruction set; with OF_PLAIN, the yardstick, one element at a time. It
 * goes by chunks of draws, which lie where they do in the parameter: a span may begin and end within
 * one. */
#include "instance.h"
#include "memory.h"
#include "rounded_block.h"

#ifdef OF_PLAIN
enum { OF_ONE_BY_ONE = true };
#else
enum { OF_ONE_BY_ONE = false };
#endif

/* The way of an update, constant in every loop. */
typedef struct of_how {
    bool wide; /* the state is float32 */
    bool param, state; /* rounded stochastically */
} of_how;

typedef struct of_arrays {
    of_stored *param;
    const of_stored *grad;
    void *state[OF_N_STATE];
    const double *factors; /* of the gradient, or NULL */
} of_arrays;

/* The words of the parameter and of each state tensor: streams 0, 1, ... */
typedef struct of_drawn {
    _Alignas(64) of_words stream[1 + OF_N_STATE];
} of_drawn;

OF_RULE_FN void *state_at(const of_arrays *arrays, of_how how, size_t i, size_t at) {
    return (char *)arrays->state[i] + at * (how.wide ? sizeof(float) : sizeof(of_stored));
}

static void multiply(float *grad, const double *factors) {
    of_stored stored[OF_BLOCK];
    for (int k = 0; k < 2; k++) {
        for (int i = 0; i < OF_BLOCK; i++)
            grad[i] *= (float)factors[k];
        OF_NARROW_BLOCK(stored, grad);
        OF_WIDEN_BLOCK(grad, stored);
    }
}

/* By whole vectors, which memcpy() is not: what is read next would wait for its parts. */
OF_RULE_FN void copy(float *restrict to, const float *restrict from) {
    for (int i = 0; i < OF_BLOCK; i++)
        to[i] = from[i];
}

OF_RULE_FN void store(of_stored *to, const float *from, bool stochastic, const of_words words,
                      int row) {
    if (stochastic)
        of_round_block(to, from, words, row);
    else
        OF_NARROW_BLOCK(to, from);
}

/* Elements from `at` on, whose draws are a row of the chunk's. */
OF_RULE_FN void update_row(const of_constants *constants, of_how how, const of_arrays *arrays,
                           size_t at, const of_drawn *drawn, int row) {
    _Alignas(64) float param[OF_BLOCK], grad[OF_BLOCK], state[OF_N_STATE][OF_BLOCK];
    const of_constants k = *constants;
    const of_form form = OF_BODY(false);
    OF_WIDEN_BLOCK(param, arrays->param + at);
    OF_WIDEN_BLOCK(grad, arrays->grad + at);
    if (arrays->factors)
        multiply(grad, arrays->factors);
    for (size_t j = 0; j < OF_N_STATE; j++) {
        if (how.wide)
            copy(state[j], state_at(arrays, how, j, at));
        else
            OF_WIDEN_BLOCK(state[j], state_at(arrays, how, j, at));
    }
    OF_NO_ALIAS
    for (int i = 0; i < OF_BLOCK; i++) {
        of_element e = {param[i], grad[i], {0}};
        for (int j = 0; j < OF_N_STATE; j++)
            e.state[j] = state[j][i];
        OF_RULE_NAME(element)(&k, 0, form, &e);
        param[i] = e.param;
        for (int j = 0; j < OF_N_STATE; j++)
            state[j][i] = e.state[j];
    }
    store(arrays->param + at, param, how.param, drawn->stream[0], row);
    for (size_t j = 0; j < OF_N_STATE; j++) {
        if (how.wide)
            copy(state_at(arrays, how, j, at), state[j]);
        else
            store(state_at(arrays, how, j, at), state[j], how.state, drawn->stream[1 + j], row);
    }
}

OF_RULE_FN void draw_all(of_drawn *drawn, of_how how, uint64_t chunk, const of_span *span,
                         const rounded_scalars *s) {
    for (uint32_t stream = 0; stream <= OF_N_STATE; stream++) {
        const of_draw_key key = of_key_of_stream(s->seed, s->step, span->parameter, stream);
        if (stream ? how.state : how.param)
            of_draw_chunk(drawn->stream[stream], chunk, &key);
    }
}

static of_real load_state(const of_arrays *arrays, of_how how, size_t i, size_t at) {
    return how.wide ? ((const float *)arrays->state[i])[at] : of_load(arrays->state[i], at);
}

static void store_one(of_stored *to, of_real value, bool stochastic, const of_words words, size_t place) {
    const uint32_t word = words[place / OF_BLOCK / OF_HALVES][place % OF_BLOCK];
    const uint32_t half = word >> (place / OF_BLOCK % 2 * 16) & 0xffffu;
    if (stochastic)
        *to = OF_STOCHASTIC(value, OF_HALVES == 2 ? half : word);
    else
        of_store(to, 0, value);
}

/* The elements [from, to) of a chunk, one by one. at: where the first is in the span. */
static void update_ones(const of_constants *k, of_how how, const of_span *span,
                        const of_arrays *arrays, size_t at, size_t from, size_t to,
                        const of_drawn *drawn) {
    const of_form form = OF_BODY(false);
    for (size_t place = from; place < to; place++, at++) {
        of_element e = {of_load(span->param, at), of_load_gradient(span, at), {0}};
        for (size_t j = 0; j < OF_N_STATE; j++)
            e.state[j] = load_state(arrays, how, j, at);
        OF_RULE_NAME(element)(k, 0, form, &e);
        store_one(arrays->param + at, e.param, how.param, drawn->stream[0], place);
        for (size_t j = 0; j < OF_N_STATE; j++) {
            void *state = state_at(arrays, how, j, at);
            if (how.wide)
                *(float *)state = e.state[j];
            else
                store_one(state, e.state[j], how.state, drawn->stream[1 + j], place);
        }
    }
}

OF_RULE_FN void update_chunks(const of_span *span, const void *scalars, of_how how,
                              const of_arrays *arrays) {
    const of_form form = OF_BODY(false);
    const of_constants k = OF_RULE_NAME(round)(scalars, form);
    const uint64_t end = span->first + span->n;
    of_drawn drawn = {{{{0}}}};
    for (uint64_t chunk = span->first / OF_CHUNK; chunk * OF_CHUNK < end; chunk++) {
        const uint64_t place = chunk * OF_CHUNK;
        draw_all(&drawn, how, chunk, span, scalars);
        if (OF_ONE_BY_ONE || place < span->first || place + OF_CHUNK > end) {
            const uint64_t from = place < span->first ? span->first : place;
            const uint64_t to = place + OF_CHUNK < end ? place + OF_CHUNK : end;
            update_ones(&k, how, span, arrays, from - span->first, from - place, to - place, &drawn);
            continue;
        }
#pragma GCC unroll 8
        for (int row = 0; row < OF_ROWS; row++)
            update_row(&k, how, arrays, place - span->first + (size_t)row * OF_BLOCK, &drawn, row);
    }
}

/* A loop for each of: to nearest, the parameter stochastically, and the state of 16 bits, too. */
static void update_span(const of_span *span, const void *scalars) {
    const rounded_scalars *s = scalars;
    const of_how wide = {true, false, false}, wide_param = {true, true, false};
    const of_how nearest = {false, false, false}, param = {false, true, false};
    const of_how all = {false, true, true};
    of_arrays arrays = {span->param, span->grad, {NULL}, span->factors};
    for (size_t i = 0; i < OF_N_STATE; i++)
        arrays.state[i] = span->state[i];
    if (span->wide_state && s->param)
        update_chunks(span, scalars, wide_param, &arrays);
    else if (span->wide_state)
        update_chunks(span, scalars, wide, &arrays);
    else if (s->state)
        update_chunks(span, scalars, all, &arrays);
    else if (s->param)
        update_chunks(span, scalars, param, &arrays);
    else
        update_chunks(span, scalars, nearest, &arrays);
}

void OF_KERNEL_NAME(fused)(const of_span *span, const void *scalars) {
    update_span(span, scalars);
}

void OF_KERNEL_NAME(plain)(const of_span *span, const void *scalars) {
    update_span(span, scalars);
}
