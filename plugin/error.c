/* SPDX-License-Identifier: BSD-3-Clause */
/* error.c: the message of the last failure, one per thread, and that of a plan with a launch
 * that has failed. */
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

of_status of_check_slot(const of_plan *plan, size_t slot) {
    if (slot < plan->n_slots)
        return OF_OK;
    return of_fail(OF_INVALID, "there is no slot %zu: the plan has %zu", slot, plan->n_slots);
}

of_status of_plan_health(const of_plan *plan) {
    return *plan->failure ? of_fail(OF_REFUSED, "%s", plan->failure) : OF_OK;
}

void of_plan_fail(of_plan *plan) {
    if (*plan->failure)
        return;
    snprintf(plan->failure, sizeof plan->failure,
             "an update could not be launched, so parameters of this optimizer are not what they "
             "should be: %.380s. Load them from a checkpoint",
             of_error_message());
    of_log(&plan->host, OF_LOG_ERROR, "%s", plan->failure);
}
