/* SPDX-License-Identifier: BSD-3-Clause */
/* log.c: messages for people, to the host, or to stderr from the level on that OPTFUSE_LOG
 * says, read once. */
#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static const char *const names[] = {"error", "warning", "info", "debug"};

static int level_from_environment(void) {
    const char *text = getenv("OPTFUSE_LOG");
    if (!text || !*text)
        return OF_LOG_WARNING;
    for (int level = OF_LOG_ERROR; level <= OF_LOG_DEBUG; level++)
        if (strcmp(text, names[level]) == 0)
            return level;
    fprintf(stderr, "optfuse: warning: OPTFUSE_LOG=%s is not one of error, warning, info, debug\n",
            text);
    return OF_LOG_WARNING;
}

static bool is_wanted(int level) {
    static atomic_int chosen = -1;
    int known = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (known < 0) {
        known = level_from_environment();
        atomic_store_explicit(&chosen, known, memory_order_relaxed);
    }
    return level <= known;
}

void of_log(const of_host *host, int level, const char *format, ...) {
    assert(format);
    const bool to_host = host && host->log;
    if (!to_host && !is_wanted(level))
        return;
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (to_host)
        host->log(host->ctx, level, text);
    else
        fprintf(stderr, "optfuse: %s: %s\n", names[level], text);
}
