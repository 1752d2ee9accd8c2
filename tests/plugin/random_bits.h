/* SPDX-License-Identifier: BSD-3-Clause */
/* random_bits.h: random bits, the same in every run. */
#ifndef RANDOM_BITS_H
#define RANDOM_BITS_H

#include <stdint.h>

/* 53 bits, by Knuth's linear congruential generator for MMIX. */
static inline uint64_t random_bits(uint64_t *state) {
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *state >> 11;
}

#endif
