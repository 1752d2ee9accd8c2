/* SPDX-License-Identifier: BSD-3-Clause */
/* ptx.h: PTX's instructions in C. Registers hold bits. translate.py calls ptx_add_rn_f32() for
 * add.rn.f32: an instruction that is not here does not compile.
 *
 * NaNs: PTX's float32 arithmetic gives one NaN, 0x7fffffff; that of float64 any. A NaN equals
 * any other NaN (arrays.h): no promise of the project is about their bits. */
#ifndef OPTFUSE_TEST_PTX_H
#define OPTFUSE_TEST_PTX_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "machine.h"

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

static inline f32 ptx_f32(u32 bits) {
    f32 value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline f64 ptx_f64(u64 bits) {
    f64 value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline u32 ptx_b32(f32 value) {
    u32 bits;
    memcpy(&bits, &value, sizeof bits);
    return isnan(value) ? 0x7fffffffu : bits;
}
static inline u64 ptx_b64(f64 value) {
    u64 bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

#define PTX(name, type, arguments, value)                                                          \
    static inline type ptx_##name arguments {                                                      \
        return (type)(value);                                                                      \
    }

/* Integers: sums and products wrap, shifts by the width and more leave nothing or the sign. */
PTX(add_s16, u16, (u16 a, u16 b), a + b)
PTX(add_s32, u32, (u32 a, u32 b), a + b)
PTX(add_s64, u64, (u64 a, u64 b), a + b)
PTX(sub_s32, u32, (u32 a, u32 b), a - b)
PTX(sub_s64, u64, (u64 a, u64 b), a - b)
PTX(mul_lo_s32, u32, (u32 a, u32 b), a *b)
PTX(mul_lo_s64, u64, (u64 a, u64 b), a *b)
PTX(mul_wide_u32, u64, (u32 a, u32 b), (u64)a *b)
PTX(mad_lo_s32, u32, (u32 a, u32 b, u32 c), a *b + c)
PTX(mad_lo_s64, u64, (u64 a, u64 b, u64 c), a *b + c)
PTX(min_u64, u64, (u64 a, u64 b), a < b ? a : b)
PTX(min_u32, u32, (u32 a, u32 b), a < b ? a : b)
PTX(max_u32, u32, (u32 a, u32 b), a > b ? a : b)
PTX(min_s32, u32, (u32 a, u32 b), (s32)a < (s32)b ? a : b)
PTX(div_u32, u32, (u32 a, u32 b), b ? a / b : UINT32_MAX)
PTX(neg_s32, u32, (u32 a), 0u - a)
PTX(and_b16, u16, (u16 a, u16 b), a &b)
PTX(and_b32, u32, (u32 a, u32 b), a &b)
PTX(and_b64, u64, (u64 a, u64 b), a &b)
PTX(and_pred, bool, (bool a, bool b), a &&b)
PTX(or_b16, u16, (u16 a, u16 b), a | b)
PTX(or_b32, u32, (u32 a, u32 b), a | b)
PTX(or_b64, u64, (u64 a, u64 b), a | b)
PTX(or_pred, bool, (bool a, bool b), a || b)
PTX(xor_b32, u32, (u32 a, u32 b), a ^ b)
PTX(xor_b64, u64, (u64 a, u64 b), a ^ b)
PTX(xor_pred, bool, (bool a, bool b), a != b)
PTX(not_b32, u32, (u32 a), ~a)
PTX(not_b64, u64, (u64 a), ~a)
PTX(not_pred, bool, (bool a), !a)
PTX(shl_b32, u32, (u32 a, u32 by), by < 32 ? a << by : 0)
PTX(shl_b64, u64, (u64 a, u32 by), by < 64 ? a << by : 0)
PTX(shr_u16, u16, (u16 a, u32 by), by < 16 ? a >> by : 0)
PTX(shr_u32, u32, (u32 a, u32 by), by < 32 ? a >> by : 0)
PTX(shr_u64, u64, (u64 a, u32 by), by < 64 ? a >> by : 0)
PTX(shr_s32, u32, (u32 a, u32 by), (s32)a >> (by < 31 ? by : 31))
PTX(shr_s64, u64, (u64 a, u32 by), (s64)a >> (by < 63 ? by : 63))
PTX(bfe_u32, u32, (u32 a, u32 from, u32 n),
    ptx_shr_u32(a, from & 255) & ((n & 255) < 32 ? (1u << (n & 255)) - 1 : UINT32_MAX))

/* Byte i of the result is byte (how >> 4 * i) % 8 of b:a, or its sign where bit 3 is set. */
static inline u32 ptx_prmt_b32(u32 a, u32 b, u32 how) {
    const u64 both = (u64)b << 32 | a;
    u32 made = 0;
    for (int i = 0; i < 4; i++, how >>= 4) {
        const u32 byte = both >> 8 * (how & 7) & 255;
        made |= (how & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
    }
    return made;
}

#define PTX_COMPARE(name, type, operator)                                                          \
    static inline bool ptx_setp_##name(type a, type b) {                                           \
        return a operator b;                                                                       \
    }
PTX_COMPARE(eq_b16, u16, ==)
PTX_COMPARE(eq_s16, s16, ==)
PTX_COMPARE(ne_b16, u16, !=)
PTX_COMPARE(ne_s16, s16, !=)
PTX_COMPARE(gt_s16, s16, >)
PTX_COMPARE(lt_s16, s16, <)
PTX_COMPARE(lt_u16, u16, <)
PTX_COMPARE(eq_b32, u32, ==)
PTX_COMPARE(eq_s32, s32, ==)
PTX_COMPARE(ne_b32, u32, !=)
PTX_COMPARE(ne_s32, s32, !=)
PTX_COMPARE(lt_s32, s32, <)
PTX_COMPARE(le_s32, s32, <=)
PTX_COMPARE(gt_s32, s32, >)
PTX_COMPARE(ge_s32, s32, >=)
PTX_COMPARE(lt_u32, u32, <)
PTX_COMPARE(le_u32, u32, <=)
PTX_COMPARE(gt_u32, u32, >)
PTX_COMPARE(ge_u32, u32, >=)
PTX_COMPARE(eq_s64, s64, ==)
PTX_COMPARE(ne_s64, s64, !=)
PTX_COMPARE(lt_s64, s64, <)
PTX_COMPARE(gt_s64, s64, >)
PTX_COMPARE(lt_u64, u64, <)
PTX_COMPARE(le_u64, u64, <=)
PTX_COMPARE(gt_u64, u64, >)
PTX_COMPARE(ge_u64, u64, >=)

/* A name that ends in u is true of NaNs, too. */
#define PTX_COMPARE_FLOAT(type, bits)                                                              \
    PTX(setp_eq_##type, bool, (bits a, bits b), ptx_##type(a) == ptx_##type(b))                    \
    PTX(setp_ne_##type, bool, (bits a, bits b), islessgreater(ptx_##type(a), ptx_##type(b)))       \
    PTX(setp_lt_##type, bool, (bits a, bits b), ptx_##type(a) < ptx_##type(b))                     \
    PTX(setp_le_##type, bool, (bits a, bits b), ptx_##type(a) <= ptx_##type(b))                    \
    PTX(setp_gt_##type, bool, (bits a, bits b), ptx_##type(a) > ptx_##type(b))                     \
    PTX(setp_ge_##type, bool, (bits a, bits b), ptx_##type(a) >= ptx_##type(b))                    \
    PTX(setp_equ_##type, bool, (bits a, bits b), !islessgreater(ptx_##type(a), ptx_##type(b)))     \
    PTX(setp_neu_##type, bool, (bits a, bits b), !(ptx_##type(a) == ptx_##type(b)))                \
    PTX(setp_ltu_##type, bool, (bits a, bits b), !(ptx_##type(a) >= ptx_##type(b)))                \
    PTX(setp_leu_##type, bool, (bits a, bits b), !(ptx_##type(a) > ptx_##type(b)))                 \
    PTX(setp_gtu_##type, bool, (bits a, bits b), !(ptx_##type(a) <= ptx_##type(b)))                \
    PTX(setp_geu_##type, bool, (bits a, bits b), !(ptx_##type(a) < ptx_##type(b)))                 \
    PTX(setp_nan_##type, bool, (bits a, bits b), isunordered(ptx_##type(a), ptx_##type(b)))        \
    PTX(setp_num_##type, bool, (bits a, bits b), !isunordered(ptx_##type(a), ptx_##type(b)))
PTX_COMPARE_FLOAT(f32, u32)
PTX_COMPARE_FLOAT(f64, u64)

#define PTX_SELECT(type, bits)                                                                     \
    PTX(selp_##type, bits, (bits a, bits b, bool first), first ? a : b)                            \
    PTX(mov_##type, bits, (bits a), a)
PTX_SELECT(b16, u16)
PTX_SELECT(u16, u16)
PTX_SELECT(b32, u32)
PTX_SELECT(u32, u32)
PTX_SELECT(f32, u32)
PTX_SELECT(b64, u64)
PTX_SELECT(u64, u64)
PTX_SELECT(f64, u64)
PTX(mov_pred, bool, (bool a), a)
PTX(cvta_to_global_u64, u64, (u64 a), a)
PTX(cvta_param_u64, u64, (u64 a), a)

/* Arithmetic, rounded to nearest even. Without a rounding in its name an instruction rounds the
 * same: ptxas may then contract it, which translation does not (ptx_check.py). */
#define PTX_ARITHMETIC(type, bits, word, root, fused)                                              \
    PTX(add_rn_##type, bits, (bits a, bits b), ptx_##word(ptx_##type(a) + ptx_##type(b)))          \
    PTX(sub_rn_##type, bits, (bits a, bits b), ptx_##word(ptx_##type(a) - ptx_##type(b)))          \
    PTX(mul_rn_##type, bits, (bits a, bits b), ptx_##word(ptx_##type(a) * ptx_##type(b)))          \
    PTX(div_rn_##type, bits, (bits a, bits b), ptx_##word(ptx_##type(a) / ptx_##type(b)))          \
    PTX(rcp_rn_##type, bits, (bits a), ptx_##word(1 / ptx_##type(a)))                              \
    PTX(sqrt_rn_##type, bits, (bits a), ptx_##word(root(ptx_##type(a))))                           \
    PTX(fma_rn_##type, bits, (bits a, bits b, bits c),                                             \
        ptx_##word(fused(ptx_##type(a), ptx_##type(b), ptx_##type(c))))
PTX_ARITHMETIC(f32, u32, b32, sqrtf, fmaf)
PTX_ARITHMETIC(f64, u64, b64, sqrt, fma)
PTX(add_f32, u32, (u32 a, u32 b), ptx_add_rn_f32(a, b))
PTX(sub_f32, u32, (u32 a, u32 b), ptx_sub_rn_f32(a, b))
PTX(mul_f32, u32, (u32 a, u32 b), ptx_mul_rn_f32(a, b))
PTX(add_f64, u64, (u64 a, u64 b), ptx_add_rn_f64(a, b))
PTX(sub_f64, u64, (u64 a, u64 b), ptx_sub_rn_f64(a, b))
PTX(mul_f64, u64, (u64 a, u64 b), ptx_mul_rn_f64(a, b))
static inline u64 ptx_max_f64(u64 a, u64 b) {
    const f64 x = ptx_f64(a), y = ptx_f64(b);
    if (isunordered(x, y))
        return isnan(x) ? b : a;
    return x == y ? a & b : x > y ? a : b; /* of equals, 0 rather than -0 */
}
PTX(neg_f32, u32, (u32 a), a ^ 0x80000000u)
PTX(abs_f32, u32, (u32 a), a & 0x7fffffffu)
PTX(neg_f64, u64, (u64 a), a ^ 0x8000000000000000u)
PTX(abs_f64, u64, (u64 a), a & 0x7fffffffffffffffu)

/* Approximations: within a unit in the last place of this. ptx_now.nudge takes another number. */
static inline f32 ptx_flush(f32 x) {
    return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x;
}
static inline f32 ptx_near(f32 x) {
    return isfinite(x) && x != 0 ? ptx_f32(ptx_b32(x) + (u32)ptx_now.nudge) : x;
}
static inline f64 ptx_nearby(f64 x) {
    return isfinite(x) && x != 0 ? ptx_f64(ptx_b64(x) + (u64)ptx_now.nudge) : x;
}
PTX(rcp_approx_ftz_f32, u32, (u32 a), ptx_b32(ptx_flush(ptx_near(1 / ptx_flush(ptx_f32(a))))))
PTX(rsqrt_approx_f32, u32, (u32 a), ptx_b32(ptx_near(1 / sqrtf(ptx_f32(a)))))
PTX(rsqrt_approx_f64, u64, (u64 a), ptx_b64(ptx_nearby(1 / sqrt(ptx_f64(a)))))
/* The upper half of a double, from the upper half of one: a neighbour is one of these. */
static inline u64 ptx_rcp_approx_ftz_f64(u64 a) {
    const f64 made = 1 / ptx_f64(a & 0xffffffff00000000u);
    const bool exact = !isfinite(made) || made == 0;
    return (ptx_b64(made) & 0xffffffff00000000u) + (exact ? 0 : (u64)(s64)ptx_now.nudge << 32);
}

/* Conversions. */
PTX(cvt_u16_u32, u16, (u32 a), a)
PTX(cvt_u16_u64, u16, (u64 a), a)
PTX(cvt_u32_u16, u32, (u16 a), a)
PTX(cvt_u32_u64, u32, (u64 a), a)
PTX(cvt_u64_u32, u64, (u32 a), a)
PTX(cvt_s64_s32, u64, (u32 a), (s64)(s32)a)
PTX(cvt_rn_f32_s32, u32, (u32 a), ptx_b32((f32)(s32)a))
PTX(cvt_rn_f32_u32, u32, (u32 a), ptx_b32((f32)a))
PTX(cvt_rn_f64_u32, u64, (u32 a), ptx_b64((f64)a))
PTX(cvt_f64_f32, u64, (u32 a), ptx_b64((f64)ptx_f32(a)))
PTX(cvt_rn_f32_f64, u32, (u64 a), ptx_b32((f32)ptx_f64(a)))
PTX(cvt_rzi_f32_f32, u32, (u32 a), ptx_b32(truncf(ptx_f32(a))))
PTX(cvt_rni_f32_f32, u32, (u32 a), ptx_b32(rintf(ptx_f32(a))))
PTX(cvt_rmi_f32_f32, u32, (u32 a), ptx_b32(floorf(ptx_f32(a))))
PTX(cvt_rzi_f64_f64, u64, (u64 a), ptx_b64(trunc(ptx_f64(a))))
/* Ends of the range for what is outside of it, 0 for a NaN. */
static inline u32 ptx_cvt_rzi_s32_f32(u32 a) {
    const f32 x = ptx_f32(a);
    if (x >= 0x1p31f || x <= -0x1p31f)
        return x > 0 ? 0x7fffffffu : 0x80000000u;
    return isnan(x) ? 0 : (u32)(s32)x;
}
PTX(cvt_f32_bf16, u32, (u16 a), (u32)a << 16)
static inline u16 ptx_cvt_rn_bf16_f32(u32 a) {
    const u32 kept = a >> 16;
    if (isnan(ptx_f32(a)))
        return 0x7fff;
    return (u16)((a + 0x7fff + (kept & 1)) >> 16); /* a carry into the exponent is right */
}
static inline u32 ptx_cvt_f32_f16(u16 a) {
    const f32 fraction = (f32)(a & 0x3ff), sign = a & 0x8000 ? -1.0f : 1.0f;
    const int exponent = a >> 10 & 31;
    if (exponent == 31)
        return ptx_b32(fraction != 0 ? NAN : sign * INFINITY);
    return ptx_b32(sign *
                   (exponent ? ldexpf(1024 + fraction, exponent - 25) : fraction * 0x1p-24f));
}
/* A float16 is a whole number of units, and from 2^15 - 16 on infinite. */
static inline u16 ptx_cvt_rn_f16_f32(u32 a) {
    const f64 size = fabs((f64)ptx_f32(a));
    const u16 sign = a >> 16 & 0x8000;
    int exponent = -13;
    if (isnan(size))
        return 0x7fff;
    if (size >= 65520)
        return sign | 0x7c00;
    if (size >= 0x1p-14)
        frexp(size, &exponent); /* size is in [2^(exponent - 1), 2^exponent) */
    const int unit = exponent - 11;
    const u32 units = (u32)rint(ldexp(size, -unit));
    return (u16)(sign | (units + ((u32)(unit + 24) << 10))); /* a carry is right here, too */
}

/* Memory. `line` is the instruction's place in the PTX. */
#define PTX_MEMORY(type, bits)                                                                     \
    static inline bits ptx_get_##type(const unsigned char *from) {                                 \
        type value;                                                                                \
        memcpy(&value, from, sizeof value);                                                        \
        return (bits)value;                                                                        \
    }                                                                                              \
    static inline void ptx_put_##type(unsigned char *to, bits value) {                             \
        const type kept = (type)value;                                                             \
        memcpy(to, &kept, sizeof kept);                                                            \
    }
PTX_MEMORY(u8, u16)
PTX_MEMORY(u16, u16)
PTX_MEMORY(u32, u32)
PTX_MEMORY(u64, u64)
#define ptx_get_b32 ptx_get_u32
#define ptx_put_b32 ptx_put_u32
#define ptx_get_f32 ptx_get_u32
#define ptx_put_f32 ptx_put_u32
#define ptx_get_f64 ptx_get_u64
#define ptx_put_f64 ptx_put_u64

#endif
