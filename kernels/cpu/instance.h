/* SPDX-License-Identifier: BSD-3-Clause */
/* instance.h: what one compilation of the loop is for. The build defines
 *
 *   OF_RULE, OF_RULE_HEADER, OF_VARIANTS   adam, "../rules/adam.h", ADAM_VARIANTS
 *   OF_N_STATE                             ADAM_N_STATE
 *   OF_DTYPE                               float32, and OF_DTYPE_FLOAT32
 *   OF_ISA                                 avx2
 *
 * and gets the functions of_adam_float32_avx2_fused and ..._plain, one for
 * each reference.
 */
#ifndef OPTFUSE_CPU_INSTANCE_H
#define OPTFUSE_CPU_INSTANCE_H

#include "stored.h"

#include OF_RULE_HEADER

typedef OF_RULE_NAME(constants) of_constants;

of_kernel_fn OF_KERNEL_NAME(fused);
of_kernel_fn OF_KERNEL_NAME(plain);

/* True if every element takes the reference's scalar code. */
#define OF_ALL_TAIL (OF_NARROW && OF_RULE_NAME(narrow_is_scalar))

#endif
