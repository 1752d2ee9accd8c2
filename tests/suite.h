/* SPDX-License-Identifier: BSD-3-Clause */
/* suite.h: a suite is one program. A test that is written there is run there, in the order of the
 * file; suite.c has main(). */
#ifndef OPTFUSE_TEST_SUITE_H
#define OPTFUSE_TEST_SUITE_H

#include <check.h>

TCase *suite_tests(void); /* those of this program */

/* TEST(name) { ... }; or a test for each row of a table, which is told the number of its row:
 * TESTS(name, rows) { ... }. */
#define TEST(name)                                                                                 \
    static void name##_test(void);                                                                 \
    SUITE_ADD(name, 1, name##_test())                                                              \
    static void name##_test(void)
#define TESTS(name, rows)                                                                          \
    static void name##_test(int row);                                                              \
    SUITE_ADD(name, rows, name##_test(_i))                                                         \
    static void name##_test(int row)
#define SUITE_ADD(name, rows, call)                                                                \
    START_TEST(name) {                                                                             \
        call;                                                                                      \
    }                                                                                              \
    END_TEST                                                                                       \
    __attribute__((constructor)) static void name##_is_a_test(void) {                              \
        tcase_add_loop_test(suite_tests(), name, 0, (int)(rows));                                  \
    }

/* A test between two calls. */
#define AROUND(name, begin, end)                                                                   \
    static void name##_within(void);                                                               \
    TEST(name) {                                                                                   \
        begin;                                                                                     \
        name##_within();                                                                           \
        end;                                                                                       \
    }                                                                                              \
    static void name##_within(void)

#define LENGTH(table) (sizeof(table) / sizeof *(table))

#endif
