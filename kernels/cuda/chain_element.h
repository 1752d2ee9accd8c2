/* SPDX-License-Identifier: BSD-3-Clause */
/* chain_element.h: one element's update by a chain of operators, as PyTorch's CUDA
 * computes it. In C and on the GPU. The build defines, beside what stored.h wants,
 *
 *   OF_FORM          rmsprop, nadam_foreach: the rule's formula on GPUs
 *   OF_RULE_HEADER   the header that has it
 *   OF_ROOTS         RMSPROP_ROOTS: how many square roots it takes
 */
#ifndef OPTFUSE_CUDA_CHAIN_ELEMENT_H
#define OPTFUSE_CUDA_CHAIN_ELEMENT_H

#define OF_ATEN_CUDA

#include "../cpu/stored.h"

#include OF_RULE_HEADER

#define OF_FORM_NAME(name) OF_PASTE(OF_FORM, name)

typedef OF_FORM_NAME(scalars) of_scalars;

/* An update's scalars, each rounded to the type of the computation once and not at
 * every element: GPUs are slow at double. */
typedef struct of_chain {
    of_scalars scalars;
    bool decays; /* whether there is weight decay, however little */
} of_chain;

OF_RULE_FN of_chain of_chain_round(const void *prepared) {
    enum { NUMBERS = (sizeof(of_scalars) - sizeof(chain_scalars)) / sizeof(double) };
    of_chain chain;
    double numbers[NUMBERS];
    memcpy(&chain.scalars, prepared, sizeof chain.scalars);
    memcpy(numbers, (const char *)prepared + sizeof(chain_scalars), sizeof numbers);
    for (int i = 0; i < NUMBERS; i++)
        numbers[i] = (double)of_rounded(numbers[i]);
    memcpy((char *)&chain.scalars + sizeof(chain_scalars), numbers, sizeof numbers);
    chain.decays = chain.scalars.chain.weight_decay != 0.0;
    chain.scalars.chain.weight_decay = (double)of_rounded(chain.scalars.chain.weight_decay);
#ifdef OF_RULE_ASGD
    asgd_foreach_meet(&chain.scalars, chain.scalars.eta, chain.scalars.mu);
#endif
    return chain;
}

/* On a GPU roots are correctly rounded. C has no empty arrays. */
OF_RULE_FN void of_chain_update(const of_chain *chain, of_element *e) {
    const of_form form = {true, false};
    const of_scalars *s = &chain->scalars;
    const unsigned variant = s->chain.variant;
    of_real roots[OF_ROOTS > 0 ? OF_ROOTS : 1] = {0};
    if (s->chain.maximize)
        e->grad = -e->grad;
    if (chain->decays)
        e->grad = aten_add(form, e->grad, e->param, s->chain.weight_decay);
#if OF_ROOTS
    OF_FORM_NAME(radicand)(s, variant, form, e, roots);
    for (int i = 0; i < OF_ROOTS; i++)
        roots[i] = aten_round(of_square_root(roots[i]));
#endif
    OF_FORM_NAME(element)(s, variant, form, e, roots);
}

#endif
