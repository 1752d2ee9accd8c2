/* SPDX-License-Identifier: BSD-3-Clause */
/* mutation.h: which mutant of a kernel runs (mutate.py), and what the kernel has reached. */
#ifndef OPTFUSE_TEST_PTX_MUTATION_H
#define OPTFUSE_TEST_PTX_MUTATION_H

#include <fenv.h>

#include "ptx.h"

typedef struct ptx_mutant {
    int place; /* of its instruction */
    const char *kind, *what;
} ptx_mutant;

enum { PTX_MOST_PLACES = 8192 };

typedef struct ptx_mutation_state {
    int number, place;                       /* -1: none */
    unsigned char reached[PTX_MOST_PLACES];  /* by predicated instructions: 1 false, 2 true */
    unsigned char pairs[PTX_MOST_PLACES];    /* of what is combined there: bit 2 * a + b */
    unsigned char executed[PTX_MOST_PLACES]; /* ever */
} ptx_mutation_state;

extern ptx_mutation_state ptx_mutation;
extern const ptx_mutant ptx_mutants[];
extern const int ptx_n_mutants, ptx_n_places;
extern const char ptx_mutated[]; /* the kernel */

/* Other roundings of cvt.rn.bf16.f32. */
static inline u16 ptx_cvt_rz_bf16_f32(u32 a) {
    return isnan(ptx_f32(a)) ? 0x7fff : (u16)(a >> 16);
}
static inline u16 ptx_cvt_rm_bf16_f32(u32 a) {
    return (u16)(ptx_cvt_rz_bf16_f32(a) + (a >> 31 && a & 0xffff && !isnan(ptx_f32(a))));
}
static inline u16 ptx_cvt_rp_bf16_f32(u32 a) {
    return (u16)(ptx_cvt_rz_bf16_f32(a) + (!(a >> 31) && a & 0xffff && !isnan(ptx_f32(a))));
}

static inline bool ptx_reached(int place, bool holds) {
    ptx_mutation.reached[place] |= holds ? 2 : 1;
    return holds;
}

#endif
