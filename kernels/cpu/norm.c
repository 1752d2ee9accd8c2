/* SPDX-License-Identifier: BSD-3-Clause */
/* norm.c: norm.h for one order and instruction set. The build defines
 *
 *   OF_ORDER, OF_ISA   their names: avx2, baseline
 *   OF_LANES           running sums
 *   OF_FUSED           1 or 0: whether squares are added to them by fused multiply-adds
 *   OF_ROUNDED_BY      what does not fill a vector: so many squares at a time are rounded before
 *                      they are added, and the others not; 0: none
 *
 * PyTorch sums the squares of whole vectors in lanes, adds the lanes in order, and then what does
 * not fill a vector. The norm of one element is its absolute value. */
#include <math.h>
#include <string.h>

#include "../norm.h"

#if OF_FUSED
#include <arm_neon.h>
#endif

#define OF_PASTE2(a, b, c) a##_##b##_##c
#define OF_PASTE(a, b, c) OF_PASTE2(a, b, c)
#define OF_NORM OF_PASTE(of_norm, OF_ORDER, OF_ISA)

of_norm_fn OF_NORM;

enum { LANES = OF_LANES, TOGETHER = 4 };
_Static_assert(OF_LANES >= OF_NORM_LANES && OF_LANES <= OF_NORM_SUMS, "callers count on it");
typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
#define OF_INLINE static inline __attribute__((always_inline))

/* The arrays whose vectors are being summed. */
typedef struct chain {
    of_norm *of;
    const float *next;
    size_t left; /* whole vectors */
    lanes squares;
} chain;

static bool is_scaled(const of_norm *of) {
    return of->factors[0] != 1.0 || of->factors[1] != 1.0;
}

/* The squares of the next vector, added to the sums. */
OF_INLINE lanes add_squares(lanes sums, const chain *c, const float *at, bool scaled) {
    lanes x = *(const lanes *)(const void *)at;
    if (scaled)
        x = x * (float)c->of->factors[0] * (float)c->of->factors[1];
#if OF_FUSED
    return (lanes)vfmaq_f32((float32x4_t)sums, (float32x4_t)x, (float32x4_t)x);
#else
    return sums + x * x;
#endif
}

OF_INLINE void add_to_one(chain *c, size_t vectors, bool scaled) {
    lanes squares = c->squares;
    for (size_t i = 0; i < vectors * LANES; i += LANES)
        squares = add_squares(squares, c, c->next + i, scaled);
    c->squares = squares;
}

OF_INLINE void add_to_four(chain c[TOGETHER], size_t vectors, bool scaled) {
    const float *const x0 = c[0].next, *const x1 = c[1].next;
    const float *const x2 = c[2].next, *const x3 = c[3].next;
    lanes s0 = c[0].squares, s1 = c[1].squares, s2 = c[2].squares, s3 = c[3].squares;
    for (size_t i = 0; i < vectors * LANES; i += LANES) {
        s0 = add_squares(s0, &c[0], x0 + i, scaled);
        s1 = add_squares(s1, &c[1], x1 + i, scaled);
        s2 = add_squares(s2, &c[2], x2 + i, scaled);
        s3 = add_squares(s3, &c[3], x3 + i, scaled);
    }
    c[0].squares = s0, c[1].squares = s1, c[2].squares = s2, c[3].squares = s3;
}

/* As many vectors of each as the shortest has, of four arrays or of the first one. */
static void add(chain c[TOGETHER], size_t n) {
    const size_t together = n == TOGETHER ? TOGETHER : 1;
    size_t vectors = c[0].left;
    bool scaled = false;
    for (size_t i = 0; i < together; i++) {
        vectors = c[i].left < vectors ? c[i].left : vectors;
        scaled = scaled || is_scaled(c[i].of);
    }
    if (together == 1)
        scaled ? add_to_one(c, vectors, true) : add_to_one(c, vectors, false);
    else
        scaled ? add_to_four(c, vectors, true) : add_to_four(c, vectors, false);
    for (size_t i = 0; i < together; i++) {
        c[i].next += vectors * LANES;
        c[i].left -= vectors;
    }
}

static float scaled_at(const of_norm *of, size_t at) {
    return of->data[at] * (float)of->factors[0] * (float)of->factors[1];
}

/* A sum that is finite has no other squares in it, and an infinity times 0 is no number. */
static bool is_finite(const of_norm *of, float norm) {
    bool finite = true;
    if (!isfinite(norm))
        for (size_t i = 0; i < of->n; i++)
            finite = finite && isfinite(of->data[i]);
    return finite;
}

static void finish(const chain *c) {
    of_norm *of = c->of;
    if (of->sums)
        memcpy(of->sums, &c->squares, sizeof c->squares);
    float sum = c->squares[0];
    for (int i = 1; i < LANES; i++)
        sum += c->squares[i];
    size_t at = of->n / LANES * LANES;
#if OF_ROUNDED_BY == 0
    const size_t fused = at;
#else
    const size_t fused = at + (of->n - at) / OF_ROUNDED_BY * OF_ROUNDED_BY;
#endif
    for (; at < of->n; at++) {
        const float x = scaled_at(of, at);
        const float square = x * x;
        sum = at < fused ? sum + square : fmaf(x, x, sum);
    }
    of->norm = of->n == 1 && !of->sums ? fabsf(scaled_at(of, 0)) : sqrtf(sum);
    of->finite = is_finite(of, of->norm);
}

static void begin(chain *c, of_norm *of) {
    *c = (chain){.of = of, .next = of->data, .left = of->n / LANES};
    if (of->sums)
        memcpy(&c->squares, of->sums, sizeof c->squares);
}

/* Lets go of the chains whose vectors are over. Returns how many go on. */
static size_t finish_some(chain c[TOGETHER], size_t n) {
    size_t kept = 0;
    for (size_t i = 0; i < n; i++)
        if (c[i].left == 0)
            finish(&c[i]);
        else
            c[kept++] = c[i];
    return kept;
}

void OF_NORM(of_norm *const norms[], size_t n) {
    chain c[TOGETHER];
    size_t under_way = 0, next = 0;
    while (next < n || under_way > 0) {
        while (under_way < TOGETHER && next < n)
            begin(&c[under_way++], norms[next++]);
        add(c, under_way);
        under_way = finish_some(c, under_way);
    }
}
