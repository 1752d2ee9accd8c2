/* SPDX-License-Identifier: BSD-3-Clause */
/* guard.h: names the safety checks so that a test-only build can switch one
 * off and see wrong numbers. In every other build a guard is the constant
 * true and leaves nothing behind in the binary. Sources that both builds share are
 * compiled with OF_NO_GUARDS: a guard there could not be switched off, and is an error. */
#ifndef OPTFUSE_GUARD_H
#define OPTFUSE_GUARD_H

#include <stdbool.h>

#if defined(OF_TEST_GUARDS)
#ifdef __cplusplus
extern "C"
#endif
    /* false if the comma-separated list in the environment variable
     * OPTFUSE_TEST_GUARDS_OFF holds the name. Visible: the Python loader asks too */
    __attribute__((visibility("default"))) bool
    of_guard_enabled(const char *name);
#define OF_GUARD(name) of_guard_enabled(#name)
#elif !defined(OF_NO_GUARDS)
#define OF_GUARD(name) true
#endif

#endif
