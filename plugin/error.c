/* SPDX-License-Identifier: BSD-3-Clause */
/* error.c: the message of the last failure, one per thread. */
#include <stdarg.h>
#include <stdio.h>

#include "internal.h"

static _Thread_local char message[1024];

const char *of_error_message(void) {
    return message;
}

void of_set_error(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
}

of_status of_fail(of_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    return status;
}
