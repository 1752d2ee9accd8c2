/* SPDX-License-Identifier: BSD-3-Clause */
/* factored.h: the passes over memory of an update by Adafactor or CAME, whose averages of squares
 * are those of rows and columns, with the bits of PyTorch's operators on the CPU (docs/numerics.md).
 * Between them the caller makes the averages, which are small.
 *
 *   OF_SQUARES       sums of g^2 + eps over rows and over columns
 *   OF_PARAM_NORM    the 2-norm of p
 *   OF_UPDATE_NORM   that of u = row * column * g
 *   OF_RESIDUALS     CAME: m = beta1 m + weight1 u / divisor, and the sums for u / divisor - m
 *   OF_WRITE         p = p + decay p - rate u / divisor, or beta1's average of these updates;
 *                    CAME: - rate row * column * m
 *
 * Of a parameter with one dimension OF_SQUARES makes the average itself, and u is g / sqrt() of it. */
#ifndef OPTFUSE_FACTORED_H
#define OPTFUSE_FACTORED_H

#include "kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum of_factored_pass {
    OF_SQUARES,
    OF_PARAM_NORM,
    OF_UPDATE_NORM,
    OF_RESIDUALS,
    OF_WRITE
} of_factored_pass;

typedef struct of_factored {
    void *param;
    const void *grad;
    float *momentum; /* m, or NULL */
    float *whole;    /* the average of a parameter with one dimension, or NULL */
    size_t matrices, rows, columns; /* the last two dimensions, and the others' product */
    const float *by_row, *by_column; /* of each matrix; NULL: CAME's m is not multiplied */
    bool is_came;
    float eps, beta, weight; /* beta, weight: of `whole` */
    float divisor, rate, beta1, weight1, decay;
    bool decays;
    bool stochastic; /* a parameter of 16 bits is rounded stochastically, by: */
    uint64_t seed;
    uint32_t step, parameter;
    float *row_sums, *column_sums; /* out, of each matrix */
    float *room;                   /* of of_factored_room() floats */
    float norm;                    /* out */
} of_factored;

/* The matrices or, of OF_WRITE, the elements [begin, end). Norms are of all. */
typedef void of_factored_fn(of_factored *f, of_factored_pass pass, size_t begin, size_t end);

/* The best whose ISA is at most `isa`; all of a dtype give the same bits. NULL for float64. */
of_factored_fn *of_factored_find(of_dtype dtype, of_isa isa);

/* A multiple of it begins a part of OF_WRITE that another thread may make. */
enum { OF_FACTORED_BLOCK = 1024 };

static inline size_t of_factored_room(size_t rows, size_t columns) {
    return (columns < 8 ? rows : 4) * columns + OF_FACTORED_BLOCK;
}

#ifdef __cplusplus
}
#endif
#endif
