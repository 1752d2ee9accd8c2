/* SPDX-License-Identifier: BSD-3-Clause */
/* largest.c: of_largest_fn of norm.h for one instruction set; the build defines OF_ISA.
 *
 * The bits of floating-point numbers without a sign are integers in the order of the numbers.
 * Behind all numbers comes the infinity, and behind that NaN. */
#include <stdint.h>
#include <string.h>

#include "../norm.h"

#define OF_PASTE2(a, b) a##_##b
#define OF_PASTE(a, b) OF_PASTE2(a, b)
#define OF_LARGEST OF_PASTE(of_largest, OF_ISA)

of_largest_fn OF_LARGEST;

#define DEFINE_LARGEST(integer, unsign)                                                            \
    static void largest_##integer(void *to, const integer *from, size_t n) {                       \
        integer most = 0;                                                                          \
        for (size_t i = 0; i < n; i++) {                                                           \
            const integer bits = (integer)(from[i] & (unsign));                                    \
            most = bits > most ? bits : most;                                                      \
        }                                                                                          \
        memcpy(to, &most, sizeof most);                                                            \
    }

DEFINE_LARGEST(int16_t, INT16_MAX)
DEFINE_LARGEST(int32_t, INT32_MAX)
DEFINE_LARGEST(int64_t, INT64_MAX)

void OF_LARGEST(void *to, const void *from, size_t n, size_t bytes) {
    if (bytes == sizeof(int16_t))
        largest_int16_t(to, from, n);
    else if (bytes == sizeof(int32_t))
        largest_int32_t(to, from, n);
    else
        largest_int64_t(to, from, n);
}
