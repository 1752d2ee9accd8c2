/* SPDX-License-Identifier: BSD-3-Clause */
/* norm.c: norm.h for one instruction set; the build defines OF_ISA.
 *
 * PyTorch sums the squares in eight lanes, adds the lanes in order, and then
 * what does not fill a vector: four squares at a time, rounded before they are
 * added, and the last three at most by fused multiply-adds. The norm of one
 * element is its absolute value. */
#include <math.h>
#include <string.h>

#include "../norm.h"

#define OF_PASTE2(a, b) a##_##b
#define OF_PASTE(a, b) OF_PASTE2(a, b)
#define OF_NORM OF_PASTE(of_norm, OF_ISA)

of_norm_fn OF_NORM;

enum { LANES = 8 };
typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

typedef struct sums {
    lanes squares;
    lanes zeros; /* NaN where a number was not finite */
} sums;

static inline __attribute__((always_inline)) void add(sums *s, const of_norm *of, size_t at) {
    const lanes x = *(const lanes *)(const void *)(of->data + at);
    const lanes scaled = x * (float)of->factors[0] * (float)of->factors[1];
    s->zeros += x * 0.0f;
    s->squares += scaled * scaled;
}

static float scaled_at(const of_norm *of, size_t at) {
    return of->data[at] * (float)of->factors[0] * (float)of->factors[1];
}

void OF_NORM(of_norm *of) {
    sums s;
    memset(&s, 0, sizeof s);
    size_t at = 0;
    for (; at + LANES <= of->n; at += LANES)
        add(&s, of, at);
    float sum = s.squares[0], zeros = s.zeros[0];
    for (int i = 1; i < LANES; i++) {
        sum += s.squares[i];
        zeros += s.zeros[i];
    }
    const size_t fused = at + (of->n - at) / 4 * 4;
    for (; at < of->n; at++) {
        const float x = scaled_at(of, at);
        const float square = x * x;
        sum = at < fused ? sum + square : fmaf(x, x, sum);
        zeros += of->data[at] * 0.0f;
    }
    of->norm = of->n == 1 ? fabsf(scaled_at(of, 0)) : sqrtf(sum);
    of->finite = zeros == 0.0f;
}
