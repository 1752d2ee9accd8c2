/* SPDX-License-Identifier: BSD-3-Clause */
/* driver.c: opens the driver once and keeps it. */
#include "driver.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512];

of_cuda_status of_cuda_fail(of_cuda_status status, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(last_error, sizeof last_error, format, arguments);
    va_end(arguments);
    return status;
}

const char *of_cuda_error(void) {
    return last_error;
}

of_cuda_status of_driver_fail(const of_driver *driver, CUresult result, const char *what) {
    const char *text = NULL;
    if (driver->error_string(result, &text) != CUDA_SUCCESS || !text)
        text = "unknown error";
    return of_cuda_fail(OF_CUDA_FAILED, "%s: %s (CUDA error %d)", what, text, (int)result);
}

/* Written once, by open_driver(). */
static of_driver opened;
static of_cuda_status opened_status = OF_CUDA_NO_DRIVER;
static char opened_error[sizeof last_error];
static pthread_once_t opened_once = PTHREAD_ONCE_INIT;

/* Code for a chip runs under any driver of its toolkit's major release. Arguments of more than
 * 4 KiB are of CUDA 12.1, and so is the PTX for older drivers, where there is some. */
enum {
    MAJOR_RELEASE = CUDA_VERSION / 1000 * 1000,
    LARGE_ARGUMENTS = 12010,
#ifdef OF_CUDA_OLDER
    OLDEST_DRIVER = LARGE_ARGUMENTS
#else
    OLDEST_DRIVER = MAJOR_RELEASE > LARGE_ARGUMENTS ? MAJOR_RELEASE : LARGE_ARGUMENTS
#endif
};

static int opened_version; /* written once, by open_driver() */

bool of_driver_is_older(void) {
    return opened_version < MAJOR_RELEASE;
}

static of_cuda_status check_version(void) {
    const CUresult result = opened.init(0);
    if (result != CUDA_SUCCESS) {
        of_driver_fail(&opened, result, "the CUDA driver does not start");
        return OF_CUDA_NO_DRIVER;
    }
    if (opened.driver_version(&opened_version) != CUDA_SUCCESS || opened_version < OLDEST_DRIVER)
        return of_cuda_fail(OF_CUDA_NO_DRIVER,
                            "the NVIDIA driver is too old: it supports CUDA up to %d.%d, the "
                            "kernels of optfuse were built with CUDA %d.%d and need a driver for "
                            "%d.%d; update the driver, or build optfuse with an older toolkit",
                            opened_version / 1000, opened_version % 1000 / 10, CUDA_VERSION / 1000,
                            CUDA_VERSION % 1000 / 10, OLDEST_DRIVER / 1000,
                            OLDEST_DRIVER % 1000 / 10);
    return OF_CUDA_OK;
}

static void open_driver(void) {
    char why[sizeof last_error] = "";
    opened_status = of_driver_find(&opened, why, sizeof why);
    if (opened_status != OF_CUDA_OK)
        of_cuda_fail(opened_status, "%s", why);
    else
        opened_status = check_version();
    if (opened_status != OF_CUDA_OK)
        snprintf(opened_error, sizeof opened_error, "%s", last_error);
}

const of_driver *of_driver_open(of_cuda_status *status) {
    pthread_once(&opened_once, open_driver);
    *status = opened_status;
    if (opened_status == OF_CUDA_OK)
        return &opened;
    of_cuda_fail(opened_status, "%s", opened_error);
    return NULL;
}

enum { DEVICES = 64 };

/* The device's primary context, retained once. */
static CUresult primary_context(const of_driver *driver, int ordinal, CUdevice device,
                                CUcontext *context) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards retained */
    static CUcontext retained[DEVICES];
    CUresult result = CUDA_SUCCESS;
    if (ordinal >= DEVICES)
        return driver->context_retain(context, device);
    pthread_mutex_lock(&lock);
    if (!retained[ordinal])
        result = driver->context_retain(&retained[ordinal], device);
    *context = retained[ordinal];
    pthread_mutex_unlock(&lock);
    return result;
}

of_cuda_status of_driver_enter(const of_driver *driver, int ordinal, CUdevice *device) {
    CUcontext context = NULL;
    CUdevice current = 0;
    CUresult result = driver->device_get(device, ordinal);
    if (result == CUDA_SUCCESS)
        result = driver->context_current(&context);
    if (result == CUDA_SUCCESS && !context) {
        result = primary_context(driver, ordinal, *device, &context);
        if (result == CUDA_SUCCESS)
            result = driver->context_set_current(context);
    }
    if (result == CUDA_SUCCESS)
        result = driver->context_device(&current);
    if (result != CUDA_SUCCESS)
        return of_driver_fail(driver, result, "no CUDA context");
    return current == *device ? OF_CUDA_OK
                              : of_cuda_fail(OF_CUDA_INVALID,
                                             "the tensors are on GPU %d, and the current CUDA "
                                             "context is another GPU's: make GPU %d current",
                                             ordinal, ordinal);
}
