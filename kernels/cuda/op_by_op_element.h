/* SPDX-License-Identifier: BSD-3-Clause */
/* op_by_op_element.h: one element's update operator by operator, as PyTorch's CUDA computes
 * it. In C and on the GPU. The build defines, beside what stored.h wants,
 *
 *   OF_FORM          rmsprop, nadam_foreach: the rule's formula on GPUs
 *   OF_RULE_HEADER   the header that has it
 *   OF_ROOTS         RMSPROP_ROOTS: how many square roots it takes
 */
#ifndef OPTFUSE_CUDA_OP_BY_OP_ELEMENT_H
#define OPTFUSE_CUDA_OP_BY_OP_ELEMENT_H

#define OF_ATEN_CUDA

#include "../cpu/stored.h"

#include OF_RULE_HEADER

#define OF_FORM_NAME(name) OF_PASTE(OF_FORM, name)

typedef OF_FORM_NAME(scalars) of_scalars;

/* An update's scalars, each rounded to the type of the computation once and not at
 * every element: GPUs are slow at double. */
typedef struct of_op_by_op {
    of_scalars scalars;
    bool decays; /* whether there is weight decay, however little */
} of_op_by_op;

OF_RULE_FN of_op_by_op of_op_by_op_round(const void *prepared) {
    enum { NUMBERS = (sizeof(of_scalars) - sizeof(op_by_op_scalars)) / sizeof(double) };
    of_op_by_op update;
    double numbers[NUMBERS];
    memcpy(&update.scalars, prepared, sizeof update.scalars);
    memcpy(numbers, (const char *)prepared + sizeof(op_by_op_scalars), sizeof numbers);
    for (int i = 0; i < NUMBERS; i++)
        numbers[i] = (double)of_rounded(numbers[i]);
    memcpy((char *)&update.scalars + sizeof(op_by_op_scalars), numbers, sizeof numbers);
    update.decays = update.scalars.common.weight_decay != 0.0;
    update.scalars.common.weight_decay = (double)of_rounded(update.scalars.common.weight_decay);
#ifdef OF_RULE_ASGD
    asgd_foreach_meet(&update.scalars, update.scalars.eta, update.scalars.mu);
#endif
    return update;
}

/* On a GPU roots are correctly rounded. C has no empty arrays. */
OF_RULE_FN void of_op_by_op_update(const of_op_by_op *update, of_element *e) {
    const of_form form = {true, false};
    const of_scalars *s = &update->scalars;
    const unsigned variant = s->common.variant;
    of_real roots[OF_ROOTS > 0 ? OF_ROOTS : 1] = {0};
    if (s->common.maximize)
        e->grad = -e->grad;
    if (update->decays)
        e->grad = aten_add(form, e->grad, e->param, s->common.weight_decay);
#if OF_ROOTS
    OF_FORM_NAME(radicand)(s, variant, form, e, roots);
    for (int i = 0; i < OF_ROOTS; i++)
        roots[i] = aten_round(of_square_root(roots[i]));
#endif
    OF_FORM_NAME(element)(s, variant, form, e, roots);
}

#endif
