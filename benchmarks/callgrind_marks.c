/* SPDX-License-Identifier: BSD-3-Clause */
/* callgrind_marks.c: from where to where valgrind's callgrind counts
 * instructions. Without valgrind around it these calls do nothing. */
#include <valgrind/callgrind.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT void count_begin(void);
void count_begin(void) {
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

/* Writes what was counted since count_begin() to a file of its own, which
 * bears this name. */
EXPORT void count_end(const char *name);
void count_end(const char *name) {
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
}
