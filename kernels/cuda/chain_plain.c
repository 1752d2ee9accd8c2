/* SPDX-License-Identifier: BSD-3-Clause */
/* chain_plain.c: a chain of PyTorch's CUDA operators, one element at a time on the
 * CPU: the yardstick of chain.cu. */
#include "../cpu/narrow.h"
#include "chain_element.h"

of_kernel_fn OF_KERNEL_NAME(chain);

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

static void update_one(const of_span *span, const of_chain *chain, unsigned used, size_t at) {
    of_element e = {load(span->param, at), load(span->grad, at), {0}};
    for (unsigned i = 0; i < OF_MAX_STATE; i++)
        if (used & (1u << i))
            e.state[i] = load(span->state[i], at);
    for (int i = 0; span->factors && i < 2; i++)
        e.grad = aten_mul_number(e.grad, span->factors[i]);
    of_chain_update(chain, &e);
    store(span->param, at, e.param);
    for (unsigned i = 0; i < OF_MAX_STATE; i++)
        if (used & (1u << i))
            store(span->state[i], at, e.state[i]);
}

void OF_KERNEL_NAME(chain)(const of_span *span, const void *scalars) {
    const of_chain chain = of_chain_round(scalars);
    const unsigned used = OF_FORM_NAME(variant_state)(chain.scalars.chain.variant);
    for (size_t i = 0; i < span->n; i++)
        update_one(span, &chain, used, i);
}
