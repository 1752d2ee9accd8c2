/* SPDX-License-Identifier: BSD-3-Clause */
/* chain_plain.c: a chain of PyTorch's CUDA operators, one element at a time on the
 * CPU: the yardstick of chain.cu. */
#include "chain_element.h"

#include "../cpu/memory.h"

of_kernel_fn OF_KERNEL_NAME(chain);

static void update_one(const of_span *span, const of_chain *chain, unsigned used, size_t at) {
    of_element e = {of_load(span->param, at), of_load_gradient(span, at), {0}};
    of_load_state(span, used, at, &e);
    of_chain_update(chain, &e);
    of_store_element(span, used, at, &e);
}

void OF_KERNEL_NAME(chain)(const of_span *span, const void *scalars) {
    const of_chain chain = of_chain_round(scalars);
    const unsigned used = OF_RULE_NAME(variant_state)(chain.scalars.chain.variant);
    for (size_t i = 0; i < span->n; i++)
        update_one(span, &chain, used, i);
}
