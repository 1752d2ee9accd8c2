/* SPDX-License-Identifier: BSD-3-Clause */
/* plain.c: the fused CUDA kernel's formula, one element at a time on the CPU:
 * the yardstick of the kernels in this directory. */
#include "../cpu/instance.h"
#include "../cpu/memory.h"
#include "lane.h"

typedef OF_RULE_NAME(cuda_constants) cuda_constants;

of_kernel_fn OF_KERNEL_NAME(cuda);

static of_step_scalars step_scalars_of(const of_cuda_scalars *s) {
    const of_step_scalars now = {(of_real)s->lr, (of_real)s->correction1, (of_real)s->correction2,
                           s->first,       s->unscaled != NULL,     OF_NARROW,
                           s->early};
    return now;
}

static void update_one(const of_span *span, const of_cuda_scalars *s, const cuda_constants *k,
                       unsigned used, size_t at) {
    of_element e = {of_load(span->param, at), of_load(span->grad, at), {0}};
    if (s->factor)
        e.grad = of_as_stored(e.grad * (of_real)*s->factor);
    if (s->unscaled) {
        e.grad = e.grad / (of_real)s->grad_scale;
        of_store(s->unscaled, at, e.grad);
    }
    of_load_state(span, used, at, &e);
    const bool quad = at < span->n - span->tail;
    OF_RULE_NAME(cuda_element)(k, used, quad, of_cuda_lane(quad, at), &e);
    of_store_element(span, used, at, &e);
}

void OF_KERNEL_NAME(cuda)(const of_span *span, const void *scalars) {
    const of_cuda_scalars *s = (const of_cuda_scalars *)scalars;
    const of_step_scalars now = step_scalars_of(s);
    const cuda_constants k = OF_RULE_NAME(cuda_round)(s->hyper, &now);
    const unsigned used = OF_RULE_NAME(cuda_state)(s->hyper);
    for (size_t i = 0; i < span->n; i++)
        update_one(span, s, &k, used, i);
}
