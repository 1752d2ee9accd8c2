/* SPDX-License-Identifier: BSD-3-Clause */
/* plain.c: the fused CUDA kernel's formula, one element at a time on the CPU:
 * the yardstick of the kernels in this directory. */
#include "../cpu/instance.h"
#include "../cpu/narrow.h"

typedef OF_RULE_NAME(cuda_constants) cuda_constants;

of_kernel_fn OF_KERNEL_NAME(cuda);

static of_real load(const void *from, size_t at) {
#ifdef OF_IS_NARROW
    return OF_PASTE(of, OF_PASTE(OF_DTYPE, widen))(((const of_stored *)from)[at]);
#else
    return ((const of_stored *)from)[at];
#endif
}

static void store(void *to, size_t at, of_real value) {
#ifdef OF_IS_NARROW
    ((of_stored *)to)[at] = OF_PASTE(of, OF_PASTE(OF_DTYPE, narrow))(value);
#else
    ((of_stored *)to)[at] = value;
#endif
}

/* To the dtype, as memory would. */
static of_real rounded(of_real value) {
    of_stored stored;
    store(&stored, 0, value);
    return load(&stored, 0);
}

static of_moment moment_of(const of_cuda_scalars *s) {
    const of_moment now = {(of_real)s->lr, (of_real)s->correction1, (of_real)s->correction2,
                           s->first,       s->unscaled != NULL,     OF_NARROW,
                           s->early};
    return now;
}

static void update_one(const of_span *span, const of_cuda_scalars *s, const cuda_constants *k,
                       unsigned used, size_t at) {
    of_element e = {load(span->param, at), load(span->grad, at), {0}};
    if (s->factor)
        e.grad = rounded(e.grad * (of_real)*s->factor);
    if (s->unscaled) {
        e.grad = e.grad / (of_real)s->grad_scale;
        store(s->unscaled, at, e.grad);
    }
    for (unsigned i = 0; i < OF_MAX_STATE; i++)
        if (used & (1u << i))
            e.state[i] = load(span->state[i], at);
    OF_RULE_NAME(cuda_element)(k, used, at < span->n - span->tail, (unsigned)(at % 4), &e);
    store(span->param, at, e.param);
    for (unsigned i = 0; i < OF_MAX_STATE; i++)
        if (used & (1u << i))
            store(span->state[i], at, e.state[i]);
}

void OF_KERNEL_NAME(cuda)(const of_span *span, const void *scalars) {
    const of_cuda_scalars *s = (const of_cuda_scalars *)scalars;
    const of_moment now = moment_of(s);
    const cuda_constants k = OF_RULE_NAME(cuda_round)(s->hyper, &now);
    const unsigned used = OF_RULE_NAME(cuda_state)(s->hyper);
    for (size_t i = 0; i < span->n; i++)
        update_one(span, s, &k, used, i);
}
