/* SPDX-License-Identifier: BSD-3-Clause */
/* log.h: hands the library's messages to Python's logging. */
#ifndef OPTFUSE_SHIM_LOG_H
#define OPTFUSE_SHIM_LOG_H

#include "host.h"
#include "python/interpreter.h"

#ifdef __cplusplus
extern "C" {
#endif

/* From now on messages go to receive(level, text), a borrowed callable that lives for ever. */
void of_log_to(of_object *receive);

/* The function in of_host.log: NULL before of_log_to(), and messages go to stderr.
 * Any thread may call the function, with or without the GIL and under any lock: the
 * interpreter's main thread calls receive() later, between two of its instructions. */
typedef void of_log_fn(void *ctx, int level, const char *message);
of_log_fn *of_log_function(void);

#ifdef __cplusplus
}
#endif
#endif
