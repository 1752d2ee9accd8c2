/* SPDX-License-Identifier: BSD-3-Clause */
/* factored.c: factored.h for one dtype and instruction set. The build defines OF_DTYPE,
 * OF_DTYPE_<NAME> and OF_ISA.
 *
 * The orders of additions are those of PyTorch's sum() and vector_norm() over contiguous float32
 * (aten/src/ATen/native/cpu/SumKernel.cpp, ReduceOpsKernel.cpp), which have no build for AVX-512:
 *
 *   cascade    16 numbers after each other, 16 such sums, 16 of those, and so on: what is added to
 *              a sum has about its size
 *   in fours   four cascades, of every fourth number; what is left goes into the first, then the
 *              others do
 *   row        its whole vectors of 8 in fours; then, from 0 on, the elements that are left and the
 *              8 lanes. Of less than 8: the elements in fours
 *   columns    of 32 columns at a time each a cascade; columns that are left each in fours. Of less
 *              than 8: of 4 at a time a cascade
 *   norm       squares of whole vectors in 8 lanes, these after each other, then what is left */
#include <math.h>
#include <string.h>

#include "../factored.h"
#include "narrow_array.h"
#include "rounded_block.h"

#define OF_FACTORED OF_PASTE(of_factored, OF_PASTE(OF_DTYPE, OF_ISA))

of_factored_fn OF_FACTORED;

enum { LANES = 8, CHAINS = 4, GROUP = LANES * CHAINS, STEP = 16, LEVELS = 4 };
enum { CHUNK = STEP * GROUP, BLOCK = OF_FACTORED_BLOCK, SPARE = 16 };

/* A vector of PyTorch's, whatever the instruction set. */
typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

/* ---- numbers */

#ifndef OF_IS_NARROW
static void widen(float *restrict to, const float *restrict from, size_t n) {
    for (size_t i = 0; i < n; i++)
        to[i] = from[i];
}
#endif

/* Each has what those before it have done. PARAM: p. GRADIENT: g. MOMENTUM: row * column * m. */
typedef enum source { PARAM, GRADIENT, MOMENTUM, UPDATE, CLIPPED, RESIDUAL } source;

static void multiply(const of_factored *f, size_t at, size_t n, float *restrict x) {
    size_t row = at / f->columns, column = at % f->columns;
    size_t matrix = row / f->rows, in_matrix = row % f->rows;
    for (size_t done = 0; done < n; column = 0) {
        const size_t left = f->columns - column;
        const size_t end = done + (left < n - done ? left : n - done);
        const float by_row = f->by_row[row++];
        const float *restrict by_column = f->by_column + matrix * f->columns + column - done;
        for (; done < end; done++)
            x[done] = by_row * by_column[done] * x[done];
        if (++in_matrix == f->rows)
            in_matrix = 0, matrix++;
    }
}

static void multiply_by_root(const float *restrict average, size_t n, float *restrict x) {
    for (size_t i = 0; i < n; i++)
        x[i] = 1.0f / sqrtf(average[i]) * x[i];
}

static void average_in(float *restrict average, float beta, float weight, size_t n,
                       const float *restrict x) {
    for (size_t i = 0; i < n; i++)
        average[i] = fmaf(x[i], weight, average[i] * beta);
}

static void divide(float divisor, size_t n, float *x) {
    for (size_t i = 0; i < n && divisor != 1.0f; i++)
        x[i] /= divisor;
}

static void subtract(const float *restrict other, size_t n, float *restrict x) {
    for (size_t i = 0; i < n; i++)
        x[i] -= other[i];
}

static void square(float eps, size_t n, float *x) {
    for (size_t i = 0; i < n; i++)
        x[i] = x[i] * x[i] + eps;
}

/* n elements from `at` on; x has SPARE more. */
static void take(const of_factored *f, source from, size_t at, size_t n, float *x) {
    if (from == MOMENTUM)
        memcpy(x, f->momentum + at, n * sizeof *x);
    else
        widen(x, (const of_stored *)(from == PARAM ? f->param : f->grad) + at, n);
    if (from >= UPDATE && f->whole != NULL)
        multiply_by_root(f->whole + at, n, x);
    else if (from >= MOMENTUM && f->by_row != NULL)
        multiply(f, at, n, x);
    if (from >= CLIPPED)
        divide(f->divisor, n, x);
    if (from == RESIDUAL) {
        average_in(f->momentum + at, f->beta1, f->weight1, n, x);
        subtract(f->momentum + at, n, x);
    }
}

/* ---- sums of rows and columns */

/* n sums of the lowest level have got their 16 numbers, for the blocks-th time. `apart`: the levels
 * of each. */
static void carry(float *sums, size_t n, size_t apart, size_t blocks) {
    for (size_t level = 1; level < LEVELS; level++, blocks /= STEP) {
        float *restrict low = sums + (level - 1) * apart, *restrict high = low + apart;
        for (size_t i = 0; i < n; i++) {
            high[i] += low[i];
            low[i] = 0.0f;
        }
        if (blocks % STEP != 0)
            return;
    }
}

/* Adds the higher levels, which become 0. */
static void gather(float *sums, size_t n, size_t apart) {
    for (size_t level = 1; level < LEVELS; level++) {
        float *restrict high = sums + level * apart, *restrict low = sums;
        for (size_t i = 0; i < n; i++) {
            low[i] += high[i];
            high[i] = 0.0f;
        }
    }
}

static float cascade(const float *x, size_t stride, size_t n) {
    float sums[LEVELS] = {0};
    for (size_t i = 0; i < n; i++) {
        sums[0] += x[i * stride];
        if ((i + 1) % STEP == 0)
            carry(sums, 1, 1, (i + 1) / STEP);
    }
    gather(sums, 1, 1);
    return sums[0];
}

static float in_fours(const float *x, size_t stride, size_t n) {
    float four[CHAINS] = {0};
    const size_t each = n / CHAINS;
    for (size_t k = 0; k < CHAINS && each != 0; k++)
        four[k] = cascade(x + k * stride, CHAINS * stride, each);
    for (size_t i = each * CHAINS; i < n; i++)
        four[0] += x[i * stride];
    return four[0] + four[1] + four[2] + four[3];
}

/* Matrices of less than 8 columns, as many as fill a block. */
static void sum_narrow(of_factored *f, source from, size_t begin, size_t end) {
    const size_t rows = f->rows, columns = f->columns, n = rows * columns;
    float *x = f->room;
    take(f, from, begin * n, (end - begin) * n, x);
    square(f->eps, (end - begin) * n, x);
    for (size_t matrix = begin; matrix < end; matrix++, x += n) {
        for (size_t i = 0; i < rows; i++)
            f->row_sums[matrix * rows + i] = in_fours(x + i * columns, 1, columns);
        for (size_t j = 0; j < columns; j++)
            f->column_sums[matrix * columns + j] =
                (j < columns / CHAINS * CHAINS ? cascade : in_fours)(x + j, columns, rows);
    }
}

/* A row's chains, each of a level together, and those of the columns that fill no group: k-th chain,
 * column. */
typedef struct chains {
    _Alignas(64) float sums[LEVELS * GROUP];
} chains;
typedef struct rest {
    _Alignas(64) float sums[LEVELS * CHAINS * GROUP];
} rest;

static void add_groups(const float *x, size_t groups, float *row, float *columns) {
    lanes *r = (lanes *)(void *)row;
    lanes r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
    for (size_t i = 0; i < groups; i++) {
        const lanes *from = (const lanes *)(const void *)(x + i * GROUP);
        lanes *c = (lanes *)(void *)(columns + i * GROUP);
        const lanes x0 = from[0], x1 = from[1], x2 = from[2], x3 = from[3];
        r0 += x0, r1 += x1, r2 += x2, r3 += x3;
        c[0] += x0, c[1] += x1, c[2] += x2, c[3] += x3;
    }
    r[0] = r0, r[1] = r1, r[2] = r2, r[3] = r3;
}

/* x: what is behind the last group of the row. */
static float end_row(chains *row, const float *x, size_t n) {
    float *four = row->sums, sum = 0.0f;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t k = 0; k < LANES; k++)
            four[k] += x[i + k];
    for (size_t chain = 1; chain < CHAINS; chain++)
        for (size_t k = 0; k < LANES; k++)
            four[k] += four[chain * LANES + k];
    for (; i < n; i++)
        sum += x[i];
    for (size_t k = 0; k < LANES; k++)
        sum += four[k];
    return sum;
}

/* Row i. Returns its sum. */
static float sum_row(of_factored *f, source from, size_t at, size_t i, rest *others) {
    float x[CHUNK + SPARE];
    chains row;
    memset(&row, 0, f->columns < CHUNK ? GROUP * sizeof(float) : sizeof row);
    const size_t columns = f->columns, in_chains = f->rows / CHAINS * CHAINS;
    size_t done = 0, groups = 0;
    for (size_t begin = 0; begin < columns; begin += CHUNK) {
        const size_t n = columns - begin < CHUNK ? columns - begin : CHUNK;
        take(f, from, at + begin, n, x);
        square(f->eps, n, x);
        groups = n / GROUP;
        add_groups(x, groups, row.sums, f->room + begin);
        done = n - groups * GROUP;
        if (n == CHUNK)
            carry(row.sums, GROUP, GROUP, begin / CHUNK + 1);
    }
    const float *left = x + groups * GROUP;
    float *chain = others->sums + (i < in_chains ? i % CHAINS : 0) * done;
    for (size_t j = 0; j < done; j++)
        chain[j] += left[j];
    if (columns >= CHUNK)
        gather(row.sums, GROUP, GROUP);
    return end_row(&row, left, done);
}

static void sum_wide(of_factored *f, source from, size_t matrix) {
    const size_t rows = f->rows, columns = f->columns, in_groups = columns / GROUP * GROUP;
    const size_t width = columns - in_groups, all = CHAINS * width;
    const size_t in_chains = rows / CHAINS * CHAINS;
    float *to = f->column_sums + matrix * columns;
    rest others;
    memset(&others, 0, LEVELS * all * sizeof(float));
    memset(f->room, 0, LEVELS * columns * sizeof(float));
    for (size_t i = 0; i < rows; i++) {
        const size_t row = matrix * rows + i;
        if (i == in_chains)
            gather(others.sums, all, all);
        f->row_sums[row] = sum_row(f, from, row * columns, i, &others);
        if ((i + 1) % STEP == 0)
            carry(f->room, in_groups, columns, (i + 1) / STEP);
        if ((i + 1) % (CHAINS * STEP) == 0)
            carry(others.sums, all, all, (i + 1) / (CHAINS * STEP));
    }
    gather(f->room, in_groups, columns);
    gather(others.sums, all, all);
    memcpy(to, f->room, in_groups * sizeof *to);
    for (size_t j = 0; j < width; j++) {
        const float *of = others.sums + j;
        to[in_groups + j] = of[0] + of[width] + of[2 * width] + of[3 * width];
    }
}

/* The whole average, or CAME's m, of a parameter with one dimension. */
static void average_whole(of_factored *f, source from) {
    float x[BLOCK + SPARE];
    for (size_t at = 0; at < f->columns; at += BLOCK) {
        const size_t n = f->columns - at < BLOCK ? f->columns - at : BLOCK;
        take(f, from, at, n, x);
        if (from == RESIDUAL)
            continue;
        square(f->eps, n, x);
        average_in(f->whole + at, f->beta, f->weight, n, x);
    }
}

static void sum(of_factored *f, source from, size_t begin, size_t end) {
    const size_t n = f->rows * f->columns, together = n < BLOCK ? BLOCK / n : 1;
    if (f->whole != NULL)
        average_whole(f, from);
    else if (f->columns < LANES)
        for (size_t at = begin; at < end; at += together)
            sum_narrow(f, from, at, end - at < together ? end : at + together);
    else
        for (size_t matrix = begin; matrix < end; matrix++)
            sum_wide(f, from, matrix);
}

/* ---- norms */

static float norm(const of_factored *f, source from) {
    float x[BLOCK + SPARE], sum = 0.0f;
    const size_t all = f->matrices * f->rows * f->columns;
    size_t n = 0, i = 0;
    lanes squares = {0};
    for (size_t at = 0; at < all; at += n) {
        n = all - at < BLOCK ? all - at : BLOCK;
        take(f, from, at, n, x);
        for (i = 0; i + LANES <= n; i += LANES) {
            const lanes now = *(const lanes *)(const void *)(x + i);
            squares += now * now;
        }
    }
    if (all == 1)
        return fabsf(x[0]);
    for (size_t k = 0; k < LANES; k++)
        sum += squares[k];
    const size_t rounded = i + (n - i) / CHAINS * CHAINS; /* the others are fused */
    for (; i < n; i++)
        sum = i < rounded ? sum + x[i] * x[i] : fmaf(x[i], x[i], sum);
    return sqrtf(sum);
}

/* ---- the parameter */

#ifdef OF_IS_NARROW

static void round_stochastically(const of_factored *f, size_t at, size_t n, const float *x) {
    const of_draw_key key = of_key_of_stream(f->seed, f->step, f->parameter, 0);
    of_stored *to = (of_stored *)f->param + at;
    for (size_t done = 0; done < n; done += OF_CHUNK) {
        _Alignas(64) of_words words;
        of_stored some[OF_CHUNK];
        const size_t left = n - done < OF_CHUNK ? n - done : OF_CHUNK;
        of_draw_chunk(words, (at + done) / OF_CHUNK, &key);
#pragma GCC unroll 8
        for (int row = 0; row < OF_ROWS; row++)
            of_round_block(some + row * OF_BLOCK, x + done + row * OF_BLOCK, words, row);
        memcpy(to + done, some, left * sizeof *to);
    }
}

static void store(const of_factored *f, size_t at, size_t n, const float *x) {
    if (f->stochastic)
        round_stochastically(f, at, n, x);
    else
        narrow((of_stored *)f->param + at, x, n);
}

#else

static void store(const of_factored *f, size_t at, size_t n, const float *x) {
    memcpy((of_stored *)f->param + at, x, n * sizeof *x);
}

#endif

static void scale(float factor, size_t n, float *x) {
    for (size_t i = 0; i < n; i++)
        x[i] *= factor;
}

static void decay(float factor, size_t n, float *x) {
    for (size_t i = 0; i < n; i++)
        x[i] = fmaf(x[i], factor, x[i]);
}

static void write(const of_factored *f, size_t begin, size_t end) {
    float update[BLOCK + SPARE], param[BLOCK + SPARE] = {0}; /* of which whole rows are rounded */
    const bool averages = !f->is_came && f->momentum != NULL;
    for (size_t at = begin; at < end; at += BLOCK) {
        const size_t n = end - at < BLOCK ? end - at : BLOCK;
        take(f, f->is_came ? MOMENTUM : CLIPPED, at, n, update);
        take(f, PARAM, at, n, param);
        scale(f->rate, n, update);
        if (f->decays)
            decay(f->decay, n, param);
        if (averages)
            average_in(f->momentum + at, f->beta1, f->weight1, n, update);
        subtract(averages ? f->momentum + at : update, n, param);
        store(f, at, n, param);
    }
}

void OF_FACTORED(of_factored *f, of_factored_pass pass, size_t begin, size_t end) {
    if (pass == OF_SQUARES || pass == OF_RESIDUALS)
        sum(f, pass == OF_SQUARES ? GRADIENT : RESIDUAL, begin, end);
    else if (pass == OF_WRITE)
        write(f, begin, end);
    else
        f->norm = norm(f, pass == OF_PARAM_NORM ? PARAM : UPDATE);
}
