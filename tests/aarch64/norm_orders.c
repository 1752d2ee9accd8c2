/* SPDX-License-Identifier: BSD-3-Clause */
/* norm_orders.c: norms in each of the orders that the kernels have, for norm_orders.py. */
#include "norm.h"

const char *order_name(size_t order);
void norms_of_rows(size_t order, const float *numbers, size_t rows, size_t apart, size_t n,
                   float *norms);

const char *order_name(size_t order) {
    return of_norm_orders[order];
}

/* The norms of the first n numbers of each row. */
void norms_of_rows(size_t order, const float *numbers, size_t rows, size_t apart, size_t n,
                   float *norms) {
    of_norm_fn *norm = of_norm_find(order, of_isa_detect());
    for (size_t row = 0; row < rows; row++) {
        of_norm one = {.data = numbers + row * apart, .n = n, .factors = {1.0, 1.0}};
        norm(&(of_norm *){&one}, 1);
        norms[row] = one.norm;
    }
}
