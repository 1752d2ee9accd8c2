/* SPDX-License-Identifier: BSD-3-Clause */
/* by_hand.h: what instructions give, computed in other ways than ptx.h has. */
#ifndef OPTFUSE_TEST_PTX_BY_HAND_H
#define OPTFUSE_TEST_PTX_BY_HAND_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef float f32;
typedef double f64;
typedef bool pred;
typedef int none;
typedef __float128 quad; /* holds a product of doubles, and two floats' sum */

enum { LESS = 1, EQUAL = 2, GREATER = 4, NEITHER = 8 };
enum { TOWARDS_ZERO, TO_NEAREST, DOWN };

/* Digit by digit, as on paper. */
static inline u64 by_hand_product(u64 a, u64 b) {
    u64 sum = 0;
    for (int i = 0; i < 64; i++)
        if (b >> i & 1)
            sum += a << i;
    return sum;
}

static inline u64 by_hand_left(u64 a, u32 by) {
    for (u32 i = 0; i < by && i < 64; i++)
        a += a;
    return a;
}

static inline u64 by_hand_right(u64 a, u32 by) {
    for (u32 i = 0; i < by && i < 64; i++)
        a /= 2;
    return a;
}

/* Rounded down. */
static inline u64 by_hand_signed_right(int64_t a, u32 by) {
    for (u32 i = 0; i < by && i < 64; i++)
        a = a < 0 && a % 2 ? a / 2 - 1 : a / 2;
    return (u64)a;
}

static inline u32 by_hand_field(u32 a, u32 from, u32 n) {
    u32 made = 0;
    for (u32 i = 0; i < n && i < 32 && from + i < 32; i++)
        made |= (a >> (from + i) & 1) << i;
    return made;
}

static inline u32 by_hand_permuted(u32 a, u32 b, u32 how) {
    u32 made = 0;
    for (int i = 3; i >= 0; i--) {
        const u32 digit = how >> 4 * i & 15, word = digit & 4 ? b : a;
        u32 byte = word >> 8 * (digit & 3) & 255;
        if (digit >= 8)
            byte = byte >= 128 ? 255 : 0;
        made = made * 256 + byte;
    }
    return made;
}

static inline bool by_hand_less(u64 a, u64 b) {
    for (int i = 63; i >= 0; i--)
        if ((a >> i & 1) != (b >> i & 1))
            return b >> i & 1;
    return false;
}

static inline int by_hand_order(quad a, quad b) {
    const quad difference = a - b;
    if (a == b)
        return EQUAL; /* infinities have no difference */
    if (difference < 0)
        return LESS;
    return difference > 0 ? GREATER : NEITHER;
}

/* The lost part of the sum makes its last digit odd, so that rounding again rounds as once. */
static inline quad by_hand_sum(quad a, quad b) {
    quad sum = a + b;
    const quad second = sum - a, lost = (a - (sum - second)) + (b - second);
    unsigned __int128 bits;
    memcpy(&bits, &sum, sizeof bits);
    if (sum - sum == 0 && lost != 0 && bits % 2 == 0)
        bits = (lost < 0) == (sum < 0) ? bits + 1 : bits - 1;
    memcpy(&sum, &bits, sizeof bits);
    return sum;
}

/* The neighbour of an approximation that is the nearest, for so many digits. */
static inline f64 by_hand_root(f64 a, int digits) {
    f64 root = sqrt(a);
    int exponent;
    if (!(a > 0) || isinf(a))
        return root;
    frexp(root, &exponent);
    const quad unit = ldexp(1.0, exponent - digits);
    quad low = root;
    low -= fmod((f64)low, (f64)unit);
    while (low * low > a)
        low -= unit;
    while ((low + unit) * (low + unit) <= a)
        low += unit;
    return (f64)((low + unit / 2) * (low + unit / 2) < a ? low + unit : low);
}

/* A number is larger than what is none. */
static inline f64 by_hand_larger(f64 a, f64 b) {
    const int order = by_hand_order(a, b);
    if (order == NEITHER)
        return by_hand_order(a, a) == NEITHER ? b : a;
    return order == LESS || (order == EQUAL && signbit(a)) ? b : a;
}

static inline f64 by_hand_whole(f64 a, int how) {
    if (!(fabs(a) < 0x1p52))
        return a;
    const int64_t part = (int64_t)a; /* towards zero */
    const f64 left = a - (f64)part;
    f64 made = (f64)part;
    if (how == DOWN && left < 0)
        made -= 1;
    if (how == TO_NEAREST && (fabs(left) > 0.5 || (fabs(left) == 0.5 && part % 2)))
        made += left > 0 ? 1 : -1;
    return copysign(made, a);
}

static inline u32 by_hand_integer(f32 a) {
    const int order = by_hand_order(a, 0);
    if (order == NEITHER)
        return 0;
    if (fabsf(a) < 2147483648.0f)
        return (u32)(int64_t)a;
    return order == GREATER ? 2147483647 : 2147483648;
}

/* Searches all patterns from 0 to the infinity, whose values ascend, for the nearest; of two the
 * even one. From `beyond` on it is the infinity. */
static inline u16 by_hand_nearest(f32 a, u16 infinity, f64 beyond, f64 (*value)(u16)) {
    const f64 size = fabs((f64)a);
    const u16 sign = signbit(a) ? 0x8000 : 0;
    u16 low = 0, high = infinity;
    if (isnan(a))
        return 0x7fff;
    if (size >= beyond)
        return sign | infinity;
    while (high - low > 1) { /* value(low) <= size < value(high) */
        const u16 middle = (u16)((low + high) / 2);
        if (middle < infinity && value(middle) <= size)
            low = middle;
        else
            high = middle;
    }
    const f64 above = high < infinity ? value(high) : beyond * 2 - value(low);
    const f64 down = size - value(low), up = above - size;
    return sign | (u16)(down < up || (down == up && low % 2 == 0) ? low : high);
}

static inline f64 by_hand_bfloat16_value(u16 a) {
    return a >> 7 ? ldexp(128 + a % 128, (a >> 7) - 134) : ldexp(a, -133);
}
static inline u16 by_hand_bfloat16(f32 a) {
    return by_hand_nearest(a, 0x7f80, 0x1.ffp127, by_hand_bfloat16_value);
}

static inline f64 by_hand_float16_value(u16 a) {
    return a >> 10 ? ldexp(1024 + a % 1024, (a >> 10) - 25) : ldexp(a, -24);
}
static inline u16 by_hand_float16(f32 a) {
    return by_hand_nearest(a, 0x7c00, 65520, by_hand_float16_value);
}
static inline f32 by_hand_from_float16(u16 a) {
    const u16 size = a % 32768;
    const f64 value = size < 0x7c00 ? by_hand_float16_value(size) : size > 0x7c00 ? NAN : INFINITY;
    return (f32)(a / 32768 ? -value : value);
}

#endif
