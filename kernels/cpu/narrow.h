/* SPDX-License-Identifier: BSD-3-Clause */
/* narrow.h: bfloat16 and float16 to float and back, one element at a
 * time. Rounds to nearest, ties to even; denormals are kept; NaN becomes
 * a quiet NaN whose payload is not preserved. */
#ifndef OPTFUSE_CPU_NARROW_H
#define OPTFUSE_CPU_NARROW_H

#include <stdint.h>
#include <string.h>

static inline float of_float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t of_bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float of_bfloat16_widen(uint16_t stored) {
    return of_float_of_bits((uint32_t)stored << 16);
}

static inline uint16_t of_bfloat16_narrow(float value) {
    const uint32_t bits = of_bits_of_float(value);
    const uint32_t odd = (bits >> 16) & 1u;
    const uint32_t rounded = (bits + 0x7fffu + odd) >> 16;
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* Shifted left, a float16 is a float32 whose exponent is too small by 112. A denormal one
 * has the bits that a float32 between 0.5 and 1 ends with: so it comes out right where
 * the processor takes denormals for zeros, too. */
static inline float of_float16_widen(uint16_t stored) {
    const uint32_t sign = (uint32_t)(stored & 0x8000u) << 16;
    const uint32_t rest = (uint32_t)(stored & 0x7fffu) << 13;
    if (rest >= 0x0f800000u) /* infinity, NaN */
        return of_float_of_bits(sign | 0x70000000u | rest);
    const float small = of_float_of_bits(0x3f000000u + (rest >> 13)) - 0.5f;
    const uint32_t magnitude = rest < 0x00800000u ? of_bits_of_float(small) : rest + 0x38000000u;
    return of_float_of_bits(sign | magnitude);
}

static inline uint16_t of_float16_narrow(float value) {
    const uint32_t bits = of_bits_of_float(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t rest = bits & 0x7fffffffu;
    uint32_t result;
    if (rest > 0x7f800000u) {
        result = 0x7e00u;
    } else if (rest >= 0x47800000u) { /* 65536 and more */
        result = 0x7c00u;
    } else if (rest < 0x38800000u) {
        /* Denormal: adding 0.5 puts the bits in place and rounds them. */
        result = of_bits_of_float(of_float_of_bits(rest) + 0.5f) - 0x3f000000u;
    } else {
        const uint32_t odd = (rest >> 13) & 1u;
        result = (rest - 0x38000000u + 0x0fffu + odd) >> 13;
    }
    return (uint16_t)(sign | result);
}

#endif
