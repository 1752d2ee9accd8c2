/* SPDX-License-Identifier: BSD-3-Clause */
/* The rows of packing.h: what the plain C row computes, and that all others give its bits,
 * between guard pages. */
#include "packing.h"

#include "suite.h"
#include <math.h>
#include <stdlib.h>

#include "packing_memory.h"

enum { SMALL = 70, ROUNDS = 3 };
static const size_t large[] = {97, 128, 131, 257, 335};
enum { N_LARGE = sizeof large / sizeof *large, LARGEST = 335 };

/* Each size with rows without a gap, and with gaps; more than once, so that it is placed
 * elsewhere. */
static void check_sizes(const of_packing_row *row, packing_memory pair[2], const size_t *d,
                        size_t n) {
    uint64_t random = 7;
    for (size_t i = 0; i < n; i++)
        for (int round = 0; round < 2 * ROUNDS; round++) {
            const size_t ld = d[i] + (round % 2 ? 1 + random_next(&random) % MOST_GAP : 0);
            ck_assert_msg(packing_row_agrees(row, &pair[0], &pair[1], d[i], ld, &random),
                          "%s %s differs from c, d = %zu, ld = %zu", of_dtype_name(row->dtype),
                          of_isa_name(row->isa), d[i], ld);
        }
}

TEST(every_row_gives_the_bits_of_the_c_row) {
    size_t small[SMALL + 1];
    for (size_t d = 0; d <= SMALL; d++)
        small[d] = d;
    static packing_memory pairs[2][2];
    for (int i = 0; i < 4; i++)
        packing_memory_create(&pairs[i / 2][i % 2], i / 2 ? LARGEST : SMALL);
    int rows = 0;
    for (const of_packing_row *row = of_packing_rows; row->add; row++) {
        if (row->isa > of_isa_detect())
            continue;
        rows++;
        check_sizes(row, pairs[0], small, SMALL + 1);
        check_sizes(row, pairs[1], large, N_LARGE);
    }
    ck_assert_int_ge(rows, 2 * 2);
    for (int i = 0; i < 4; i++)
        packing_memory_destroy(&pairs[i / 2][i % 2]);
}

/* Sizes for the C row: each element by its formula, its place counted one by one. volatile: every
 * product and every sum is rounded. */
enum { D = 5, LD = 7, PACKED = D * (D + 1) / 2, MATRIX = (D - 1) * LD + D };

TEST(a_sum_is_rounded_after_each_operation) {
    const of_packing_row *single = of_packing_find(OF_FLOAT32, OF_ISA_C);
    const of_packing_row *wide = of_packing_find(OF_FLOAT64, OF_ISA_C);
    float matrix[MATRIX], packed[PACKED], before[PACKED];
    double matrix_wide[MATRIX], packed_wide[PACKED], before_wide[PACKED];
    uint64_t random = 3;
    for (int i = 0; i < MATRIX; i++)
        matrix[i] = (float)(matrix_wide[i] = random_real(&random) - 0.5);
    for (int i = 0; i < PACKED; i++)
        packed[i] = before[i] = (float)(packed_wide[i] = before_wide[i] = random_real(&random));
    single->add(packed, matrix, D, LD, 1.0 / 3);
    wide->add(packed_wide, matrix_wide, D, LD, 1.0 / 3);
    int at = 0;
    for (int row = 0; row < D; row++)
        for (int column = row; column < D; column++, at++) {
            volatile float product = (float)(1.0 / 3) * matrix[row * LD + column];
            volatile double product_wide = 1.0 / 3 * matrix_wide[row * LD + column];
            volatile float sum = before[at] + product;
            volatile double sum_wide = before_wide[at] + product_wide;
            ck_assert(packed[at] == sum && packed_wide[at] == sum_wide);
        }
    ck_assert_int_eq(at, PACKED);
}

TEST(a_running_average_is_rounded_after_each_operation) {
    enum { N = 40 };
    float running[N], sums[N], before[N];
    double running_wide[N], sums_wide[N], before_wide[N];
    uint64_t random = 5;
    for (int i = 0; i < N; i++) {
        running[i] = before[i] = (float)(running_wide[i] = before_wide[i] = random_real(&random));
        sums[i] = (float)(sums_wide[i] = random_real(&random));
    }
    of_packing_find(OF_FLOAT32, OF_ISA_C)->merge(running, sums, N, 0.95, 0.05 / 3);
    of_packing_find(OF_FLOAT64, OF_ISA_C)->merge(running_wide, sums_wide, N, 0.95, 0.05 / 3);
    for (int i = 0; i < N; i++) {
        volatile float kept = 0.95f * before[i], taken = (float)(0.05 / 3) * sums[i];
        volatile double kept_wide = 0.95 * before_wide[i], taken_wide = 0.05 / 3 * sums_wide[i];
        volatile float sum = kept + taken;
        volatile double sum_wide = kept_wide + taken_wide;
        ck_assert(running[i] == sum && running_wide[i] == sum_wide);
    }
}

TEST(a_matrix_is_unpacked_to_both_halves_and_damped_on_its_diagonal) {
    float matrix[MATRIX], packed[PACKED];
    for (int i = 0; i < MATRIX; i++)
        matrix[i] = -1;
    for (int i = 0; i < PACKED; i++)
        packed[i] = (float)(i + 1) / 3;
    of_packing_find(OF_FLOAT32, OF_ISA_C)->unpack(matrix, packed, D, LD, 1e-3);
    int at = 0;
    for (int row = 0; row < D; row++)
        for (int column = row; column < D; column++, at++) {
            const float expected = row == column ? packed[at] + 1e-3f : packed[at];
            ck_assert(matrix[row * LD + column] == expected);
            ck_assert(matrix[column * LD + row] == expected);
        }
    for (int i = 0; i < MATRIX; i++)
        ck_assert(i % LD < D || matrix[i] == -1); /* between the rows */
}

/* (1 + 2^-12)^2 is 1 + 2^-11 as a float, and 2^-24 more in a fused multiply-add, whichever of the
 * two products it takes. */
TEST(no_row_fuses_a_product_into_a_sum) {
    enum { SIDE = 45, N = SIDE * (SIDE + 1) / 2 };
    static float running[N], packed[N], factor[SIDE * SIDE];
    const float number = 1 + 0x1p-12f, square = 1 + 0x1p-11f;
    for (const of_packing_row *row = of_packing_rows; row->add; row++) {
        if (row->dtype != OF_FLOAT32 || row->isa > of_isa_detect())
            continue;
        for (int i = 0; i < SIDE * SIDE; i++)
            factor[i] = number;
        for (int i = 0; i < N; i++) {
            running[i] = -number;
            packed[i] = -square;
        }
        row->merge(running, factor, N, number, number);
        row->add(packed, factor, SIDE, SIDE, number);
        for (int i = 0; i < N; i++)
            ck_assert_msg(running[i] == 0 && packed[i] == 0, "%s: element %d is %g, %g",
                          of_isa_name(row->isa), i, (double)running[i], (double)packed[i]);
    }
}

TEST(there_are_rows_of_the_types_that_factors_have) {
    for (int isa = 0; isa < OF_ISA_COUNT; isa++) {
        for (int dtype = OF_FLOAT32; dtype <= OF_FLOAT64; dtype++) {
            const of_packing_row *row = of_packing_find((of_dtype)dtype, (of_isa)isa);
            ck_assert(row && row->dtype == (of_dtype)dtype && row->isa <= (of_isa)isa);
        }
        ck_assert_ptr_null(of_packing_find(OF_BFLOAT16, (of_isa)isa));
        ck_assert_ptr_null(of_packing_find(OF_FLOAT16, (of_isa)isa));
    }
    ck_assert_int_eq(of_packing_find(OF_FLOAT32, of_isa_detect())->isa, of_isa_detect());
}

TEST(a_triangle_has_half_of_the_elements_and_half_of_the_diagonal) {
    size_t sum = 0;
    for (size_t d = 0; d < 100; d++) {
        sum += d;
        ck_assert_uint_eq(of_packed_elements(d), sum);
    }
    ck_assert_uint_eq(of_packed_elements(4608), 10619136);
}
