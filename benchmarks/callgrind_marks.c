/* SPDX-License-Identifier: BSD-3-Clause */
/* callgrind_marks.c: callgrind counts from count_begin() to count_end(), and writes what it
 * counted to a file that bears the name. Without valgrind around them they do nothing. */
#include <valgrind/callgrind.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT void count_begin(void) {
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

EXPORT void count_end(const char *name) {
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
}
