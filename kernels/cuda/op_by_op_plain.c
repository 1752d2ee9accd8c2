/* SPDX-License-Identifier: BSD-3-Clause */
/* op_by_op_plain.c: PyTorch's CUDA operators one after the other, an element at a time on the
 * CPU: the yardstick of op_by_op.cu. */
#include "op_by_op_element.h"

#include "../cpu/memory.h"

of_kernel_fn OF_KERNEL_NAME(op_by_op);

static void update_one(const of_span *span, const of_op_by_op *update, unsigned used, size_t at) {
    of_element e = {of_load(span->param, at), of_load_gradient(span, at), {0}};
    of_load_state(span, used, at, &e);
    of_op_by_op_update(update, &e);
    of_store_element(span, used, at, &e);
}

void OF_KERNEL_NAME(op_by_op)(const of_span *span, const void *scalars) {
    const of_op_by_op update = of_op_by_op_round(scalars);
    const unsigned used = OF_RULE_NAME(variant_state)(update.scalars.common.variant);
    for (size_t i = 0; i < span->n; i++)
        update_one(span, &update, used, i);
}
