/* SPDX-License-Identifier: BSD-3-Clause */
/* The rows that multiply gradients and those that find their norms: what the
 * plain C row computes, and that all others give its bits, between guard pages. */
#include "suite.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arrays.h"
#include "cpu/narrow.h"
#include "norm.h"
#include "scale.h"

enum { ROUNDS = 300, MOST = 2000, TO = 0, FROM = 1 };

static const double first_factors[] = {1.0, 0.3, 0.0, 1e-4, 1.0 / 65536, 3e30, -1.5};
static const double second_factors[] = {1.0, 1.0, 0.7, 1e-3};

static void pick_factors(double factors[OF_MAX_FACTORS], uint64_t *random) {
    factors[0] = first_factors[random_next(random) % 7];
    factors[1] = second_factors[random_next(random) % 4];
}

/* Compares a row with the C row; `in_place` writes over what it reads. */
static bool agrees(const of_scale_row *row, arrays *mine, arrays *theirs, bool in_place,
                   uint64_t *random) {
    double factors[OF_MAX_FACTORS];
    const size_t n = random_next(random) % (random_next(random) % 4 ? 100 : MOST);
    int array = 0;
    size_t element = 0;
    arrays_place(mine, row->dtype, n, 0, random);
    arrays_place(theirs, row->dtype, n, 0, random);
    arrays_fill(theirs, random);
    arrays_copy(mine, theirs);
    pick_factors(factors, random);
    const int from = in_place ? TO : FROM;
    of_scale_find(row->dtype, OF_ISA_C)(theirs->at[TO], theirs->at[from], n, factors);
    row->run(mine->at[TO], mine->at[from], n, factors);
    return arrays_differ(mine, theirs, &array, &element) == 0 && arrays_intact(mine) &&
           arrays_intact(theirs);
}

TEST(every_row_gives_the_bits_of_the_c_row) {
    arrays mine, theirs;
    arrays_create(&mine, MOST * sizeof(double));
    arrays_create(&theirs, MOST * sizeof(double));
    int rows = 0;
    for (const of_scale_row *row = of_scale_rows; row->run; row++) {
        uint64_t random = 7;
        if (row->isa > of_isa_detect())
            continue;
        rows++;
        for (int i = 0; i < ROUNDS; i++)
            ck_assert_msg(agrees(row, &mine, &theirs, i % 2 == 0, &random),
                          "%s %s differs from c, round %d", of_dtype_name(row->dtype),
                          of_isa_name(row->isa), i);
    }
    ck_assert_int_ge(rows, 2 * OF_DTYPE_COUNT);
    arrays_destroy(&mine);
    arrays_destroy(&theirs);
}

TEST(each_product_is_rounded_to_the_element_type) {
    const double factors[] = {1.0 / 3, 0.7};
    const float third = (float)factors[0], other = (float)factors[1];
    const float wide = 1.7f;
    float single;
    of_scale_find(OF_FLOAT32, OF_ISA_C)(&single, &wide, 1, factors);
    volatile float once = wide * third;
    ck_assert(single == once * other);

    const uint16_t brain = of_bfloat16_narrow(wide), half = of_float16_narrow(wide);
    uint16_t result;
    of_scale_find(OF_BFLOAT16, OF_ISA_C)(&result, &brain, 1, factors);
    const uint16_t brain_once = of_bfloat16_narrow(of_bfloat16_widen(brain) * third);
    ck_assert_uint_eq(result, of_bfloat16_narrow(of_bfloat16_widen(brain_once) * other));
    of_scale_find(OF_FLOAT16, OF_ISA_C)(&result, &half, 1, factors);
    const uint16_t half_once = of_float16_narrow(of_float16_widen(half) * third);
    ck_assert_uint_eq(result, of_float16_narrow(of_float16_widen(half_once) * other));

    const double real = 1.7;
    double twice;
    of_scale_find(OF_FLOAT64, OF_ISA_C)(&twice, &real, 1, factors);
    volatile double real_once = real * factors[0];
    ck_assert(twice == real_once * factors[1]);
}

TEST(there_is_a_row_for_every_dtype_and_isa) {
    for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++)
        for (int isa = 0; isa < OF_ISA_COUNT; isa++)
            ck_assert(of_scale_find((of_dtype)dtype, (of_isa)isa) != NULL);
}

static bool is_same(const of_norm *a, const of_norm *b) {
    return (a->norm == b->norm || (isnan(a->norm) && isnan(b->norm))) && a->finite == b->finite;
}

/* Parts of one array, which ends at a guard page; the C row has them one by one. */
static bool norms_agree(size_t order, of_isa isa, arrays *a, bool special, uint64_t *random) {
    enum { PARTS = 11 };
    const size_t n = 1 + random_next(random) % (random_next(random) % 4 ? 100 : MOST - 1);
    const size_t parts = random_next(random) % (PARTS + 1);
    of_norm plain[PARTS], row[PARTS], *plains[PARTS], *rows[PARTS];
    arrays_place(a, OF_FLOAT32, n, 0, random);
    arrays_fill(a, random);
    float *x = (float *)(void *)a->at[FROM];
    for (size_t i = 0; i < n && !special; i++)
        x[i] = (float)(random_real(random) * 2.0 - 1.0);
    bool agree = true;
    for (size_t i = 0; i < parts; i++) {
        const size_t from = random_next(random) % (n + 1);
        plain[i] = (of_norm){.data = x + from, .n = n - from};
        pick_factors(plain[i].factors, random);
        row[i] = plain[i];
        plains[i] = &plain[i], rows[i] = &row[i];
        of_norm_find(order, OF_ISA_C)(&plains[i], 1);
        bool finite = true;
        for (size_t at = from; at < n; at++)
            finite = finite && isfinite(x[at]);
        agree = agree && plain[i].finite == finite;
    }
    of_norm_find(order, isa)(rows, parts);
    for (size_t i = 0; i < parts; i++)
        agree = agree && is_same(&plain[i], &row[i]);
    return agree && arrays_intact(a);
}

/* Numbers in three parts, of whole vectors but for the last, and all of them. */
static bool parts_agree(size_t order, of_isa isa, arrays *a, uint64_t *random) {
    const size_t first = 16 * (1 + random_next(random) % 20);
    const size_t n = first + 32 + random_next(random) % 50;
    arrays_place(a, OF_FLOAT32, n, 0, random);
    float *x = (float *)(void *)a->at[FROM];
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(random_real(random) * 2.0 - 1.0);
    of_norm_fn *norm = of_norm_find(order, isa);
    float sums[OF_NORM_SUMS] = {0};
    const size_t ends[] = {first, first + 16, n};
    of_norm whole = {.data = x, .n = n, .factors = {1, 1}}, part = whole;
    norm(&(of_norm *){&whole}, 1);
    part.sums = sums;
    for (size_t i = 0, from = 0; i < 3; from = ends[i++]) {
        part.data = x + from, part.n = ends[i] - from;
        norm(&(of_norm *){&part}, 1);
    }
    return part.norm == whole.norm;
}

TEST(a_norm_of_parts_has_the_bits_of_the_whole) {
    arrays a;
    arrays_create(&a, MOST * sizeof(double));
    for (size_t order = 0; of_norm_orders[order]; order++)
        for (of_isa isa = OF_ISA_C; isa <= of_isa_detect(); isa++) {
            uint64_t random = 12;
            for (int i = 0; i < ROUNDS; i++)
                ck_assert_msg(parts_agree(order, isa, &a, &random), "%s, %s, round %d",
                              of_norm_orders[order], of_isa_name(isa), i);
        }
    arrays_destroy(&a);
}

TEST(every_norm_has_the_bits_of_the_c_one) {
    arrays a;
    arrays_create(&a, MOST * sizeof(double));
    for (size_t order = 0; of_norm_orders[order]; order++)
        for (of_isa isa = OF_ISA_C; isa <= of_isa_detect(); isa++) {
            uint64_t random = 11;
            for (int i = 0; i < ROUNDS; i++)
                ck_assert_msg(norms_agree(order, isa, &a, i % 2 == 0, &random), "%s, %s, round %d",
                              of_norm_orders[order], of_isa_name(isa), i);
        }
    arrays_destroy(&a);
}

/* Fills what is read; without infinities and NaN, if they are not `special`. Returns what fabs()
 * and comparisons find. */
static double fill_and_find(arrays *a, bool special, uint64_t *random) {
    const size_t size = of_dtype_size(a->dtype);
    double most = 0.0;
    arrays_fill(a, random);
    for (size_t i = 0; i < a->n; i++) {
        unsigned char *at = a->at[FROM] + i * size;
        if (!special && !isfinite(arrays_get(at, a->dtype)))
            memset(at, 0, size);
        const double x = fabs(arrays_get(at, a->dtype));
        most = isnan(most) || x <= most ? most : x;
    }
    return most;
}

TEST(the_largest_is_found_in_every_dtype) {
    arrays a;
    uint64_t random = 13;
    arrays_create(&a, MOST * sizeof(double));
    for (of_isa isa = OF_ISA_C; isa <= of_isa_detect(); isa++)
        for (int i = 0; i < 2 * ROUNDS; i++) {
            const of_dtype dtype = (of_dtype)(i % OF_DTYPE_COUNT);
            const size_t n = 1 + random_next(&random) % (i % 5 ? 100 : MOST - 1);
            arrays_place(&a, dtype, n, 0, &random);
            const double most = fill_and_find(&a, i % 3 == 0, &random);
            of_largest_find(isa)(a.at[TO], a.at[FROM], a.n, of_dtype_size(dtype));
            const double found = arrays_get(a.at[TO], dtype);
            ck_assert_msg((found == most && !signbit(found)) || (isnan(found) && isnan(most)),
                          "%s %s, round %d: %g, not %g", of_isa_name(isa), of_dtype_name(dtype), i,
                          found, most);
            ck_assert(arrays_intact(&a));
        }
    arrays_destroy(&a);
}
