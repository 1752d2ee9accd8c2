/* SPDX-License-Identifier: BSD-3-Clause */
/* fail.h: how a function of the core, or a planner, returns a failure and says why. */
#ifndef OPTFUSE_FAIL_H
#define OPTFUSE_FAIL_H

#include "optfuse.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Returns the status. From here on of_error_message() has the text, for this thread. */
of_status of_fail(of_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

#ifdef __cplusplus
}
#endif

#endif
