/* SPDX-License-Identifier: BSD-3-Clause */
/* cell.h: an element of the arrays that a loop goes over, and the number that it is. 16-bit types
 * are converted in the loop where compilers vectorize that; elsewhere a block of them is
 * converted first (narrow_block.h), and the loop goes over floats. */
#ifndef OPTFUSE_CPU_CELL_H
#define OPTFUSE_CPU_CELL_H

#include "stored.h"

#include "../rules/real.h"
#include "narrow.h"

#if defined(OF_IS_NARROW) && defined(__aarch64__)
#define OF_CONVERTS_IN_LOOPS

typedef of_stored of_cell;

/* AArch64's conversions round as narrow.h does. For bfloat16 the baseline has none. */
#ifdef OF_DTYPE_FLOAT16

OF_RULE_FN of_real of_get(of_cell cell) {
    _Float16 number;
    memcpy(&number, &cell, sizeof number);
    return (of_real)number;
}

OF_RULE_FN of_cell of_put(of_real value) {
    const _Float16 number = (_Float16)value;
    of_cell cell;
    memcpy(&cell, &number, sizeof cell);
    return cell;
}

#else

OF_RULE_FN of_real of_get(of_cell cell) {
    return of_bfloat16_widen(cell);
}

OF_RULE_FN of_cell of_put(of_real value) {
    const uint32_t bits = of_bits_of_float(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (of_cell)(rounded | (value == value ? 0u : 0x7fc0u));
}

#endif
#else

typedef of_real of_cell;

OF_RULE_FN of_real of_get(of_cell cell) {
    return cell;
}

OF_RULE_FN of_cell of_put(of_real value) {
    return value;
}

#endif

/* The product as it would lie in memory. */
OF_RULE_FN of_real of_multiplied(of_real value, of_real factor) {
    return of_get(of_put(value * factor));
}

#endif
