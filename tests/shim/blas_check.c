/* SPDX-License-Identifier: BSD-3-Clause */
/* blas_check: matrix products through libraries that stand in for PyTorch's
 * CUDA part and for cuBLAS, loaded the way Python loads them.
 *
 *   blas_check WORD [LIBRARY ...]
 *     found N   products are right, and it was the first library, N, that made them
 *     fails TEXT   a product is refused with an error that holds TEXT
 *     tuned TEXT   PyTorch is found to choose its products otherwise, likewise */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "matrix/blas.h"
#include "fake.h"
#include "optfuse.h"

enum { ROOM = 64 };

static int failures;

static void check(bool right, const char *promise) {
    if (!right) {
        printf("FAIL %s (%s)\n", promise, of_error_message());
        failures++;
    }
}

/* One array in each type; they hold the same small integers. */
typedef struct numbers {
    float single[ROOM];
    double twice[ROOM];
    uint16_t brain[ROOM];
} numbers;

static void *array(numbers *x, of_dtype dtype) {
    return dtype == OF_FLOAT32   ? (void *)x->single
           : dtype == OF_FLOAT64 ? (void *)x->twice
                                 : (void *)x->brain;
}

static void put(numbers *x, int i, float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    x->single[i] = value;
    x->twice[i] = (double)value;
    x->brain[i] = (uint16_t)(word >> 16);
}

static double get(const numbers *x, of_dtype dtype, int64_t i) {
    const uint32_t word = (uint32_t)x->brain[i] << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return dtype == OF_FLOAT32   ? (double)x->single[i]
           : dtype == OF_FLOAT64 ? x->twice[i]
                                 : (double)value;
}

static void fill(numbers *x, int seed) {
    for (int i = 0; i < ROOM; i++)
        put(x, i, (float)((i * 7 + seed) % 5 - 2));
}

/* Element (i, j) of what the product takes. */
static double taken(const numbers *x, of_dtype dtype, const of_matrix *m, int64_t i, int64_t j) {
    return get(x, dtype, m->transposed ? j * m->stride + i : i * m->stride + j);
}

static void product_is_right(of_dtype dtype, bool ta, bool tb, double alpha, double beta) {
    enum { M = 3, N = 4, K = 5 };
    numbers a, b, c, before;
    fill(&a, 1), fill(&b, 2), fill(&c, 3);
    before = c;
    const of_matrix ma = {array(&a, dtype), ta ? K : M, ta ? M : K, 6, ta};
    const of_matrix mb = {array(&b, dtype), tb ? N : K, tb ? K : N, 7, tb};
    const of_matrix mc = {array(&c, dtype), M, N, 5, false};
    check(of_blas_product(dtype, alpha, &ma, &mb, beta, &mc), "a product is made");
    bool right = true;
    for (int64_t at = 0; at < ROOM; at++) {
        const int64_t i = at / 5, j = at % 5;
        double wanted = get(&before, dtype, at);
        if (i < M && j < N) {
            double sum = 0;
            for (int64_t k = 0; k < K; k++)
                sum += taken(&a, dtype, &ma, i, k) * taken(&b, dtype, &mb, k, j);
            wanted = alpha * sum + beta * wanted;
        }
        right &= get(&c, dtype, at) == wanted;
    }
    check(right, "c = alpha * a * b + beta * c, and nothing beside it is written");
}

static void products_are_right(void) {
    static const of_dtype dtypes[] = {OF_FLOAT32, OF_FLOAT64, OF_BFLOAT16};
    static const double scalars[][2] = {{1, 0}, {2, -1}};
    for (int d = 0; d < 3; d++)
        for (int t = 0; t < 4; t++)
            for (int s = 0; s < 2; s++)
                product_is_right(dtypes[d], t & 1, t & 2, scalars[s][0], scalars[s][1]);
}

/* The product that Muon asks for: x x^T of one matrix. */
static void a_matrix_by_its_own_transpose(void) {
    float x[6] = {1, 2, 3, 4, 5, 6}, square[4];
    const of_matrix a = {x, 2, 3, 3, false}, b = {x, 2, 3, 3, true}, c = {square, 2, 2, 2, false};
    check(of_blas_product(OF_FLOAT32, 1, &a, &b, 0, &c), "x x^T is made");
    check(square[0] == 14 && square[1] == 32 && square[2] == 32 && square[3] == 77, "x x^T");
}

static void edges(void) {
    float x[4] = {1, 2, 3, 4}, c[4] = {5, 6, 7, 8};
    of_matrix a = {x, 2, 0, 0, false}, b = {x, 0, 2, 2, false}, out = {c, 2, 2, 2, false};
    check(of_blas_product(OF_FLOAT32, 1, &a, &b, 2, &out) && c[0] == 10 && c[3] == 16,
          "nothing to sum up: c = beta * c");
    out.rows = a.rows = 0;
    check(of_blas_product(OF_FLOAT32, 1, &a, &b, 2, &out) && c[0] == 10, "no element, no call");
}

static void refused(const of_matrix *a, const of_matrix *b, const of_matrix *c, const char *text) {
    check(!of_blas_product(OF_FLOAT32, 1, a, b, 0, c) && strstr(of_error_message(), text), text);
}

static void bad_shapes(void) {
    float x[4] = {0};
    const of_matrix good = {x, 2, 2, 2, false}, tall = {x, 4, 1, 1, false};
    const of_matrix narrow = {x, 2, 2, 1, false}, turned = {x, 2, 2, 2, true};
    const of_matrix huge = {x, 2, (int64_t)1 << 31, (int64_t)1 << 31, false};
    refused(&good, &tall, &good, "a product of 2 x 2 and 4 x 1 is not 2 x 2");
    refused(&good, &narrow, &good, "matrix b of 2 x 2 can't have rows 1 elements apart");
    refused(&good, &good, &turned, "transposed");
    refused(&huge, &good, &good, "matrix a of 2 x 2147483648 is too large for cuBLAS");
}

static void is_made_by(void *library, int wanted) {
    const int *called = dlsym(library, "fake_called");
    check(called && *called == wanted, "PyTorch's own cuBLAS is the one that is used");
}

static void fails(const char *text) {
    float x[1] = {2}, c[1] = {9};
    const of_matrix a = {x, 1, 1, 1, false}, out = {c, 1, 1, 1, false};
    check(!of_blas_product(OF_FLOAT32, 1, &a, &a, 0, &out), "a product is refused");
    check(strstr(of_error_message(), text) != NULL, text);
    check(c[0] == 9, "and nothing is written");
}

static void tuned(const char *text) {
    check(!of_blas_is_untuned() && strstr(of_error_message(), text), text);
}

int main(int argc, char **argv) {
    void *first = NULL;
    for (int i = 3; i < argc; i++) {
        void *library = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            printf("%s\n", dlerror());
            return 2;
        }
        first = first ? first : library;
    }
    if (strcmp(argv[1], "fails") == 0) {
        fails(argv[2]);
    } else if (strcmp(argv[1], "tuned") == 0) {
        tuned(argv[2]);
    } else {
        check(of_blas_is_untuned(), "PyTorch's products are plain calls of cuBLAS");
        products_are_right();
        a_matrix_by_its_own_transpose();
        edges();
        bad_shapes();
        is_made_by(first, atoi(argv[2]));
    }
    printf(failures ? "%d failures\n" : "all right\n", failures);
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
