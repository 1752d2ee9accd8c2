/* SPDX-License-Identifier: BSD-3-Clause */
#define _GNU_SOURCE
#include "suite.h"

#include <errno.h>
#include <stdlib.h>

enum { SECONDS = 120 }; /* of a test, under sanitizers beside other work */

TCase *suite_tests(void) {
    static TCase *tests;
    if (!tests) {
        tests = tcase_create("tests");
        tcase_set_timeout(tests, SECONDS);
    }
    return tests;
}

int main(void) {
    Suite *suite = suite_create(program_invocation_short_name);
    suite_add_tcase(suite, suite_tests());
    SRunner *runner = srunner_create(suite);
    srunner_run_all(runner, CK_NORMAL);
    const int failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
