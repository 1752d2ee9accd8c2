/* SPDX-License-Identifier: BSD-3-Clause */
/* guard.c: the switch behind OF_GUARD. Compiled in test-only builds alone. */
#ifndef OF_TEST_GUARDS
#error "guard.c belongs to builds with -DOF_TEST_GUARDS only"
#endif

#include "guard.h"

#include <stdlib.h>
#include <string.h>

/* Read on each call, so that one test process can switch guards. */
bool of_guard_enabled(const char *name) {
    const char *off = getenv("OPTFUSE_TEST_GUARDS_OFF");
    size_t length = strlen(name);
    while (off && *off) {
        size_t item = strcspn(off, ",");
        if (item == length && strncmp(off, name, length) == 0)
            return false;
        off += item;
        off += *off == ',';
    }
    return true;
}
