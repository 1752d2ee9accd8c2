/* SPDX-License-Identifier: BSD-3-Clause */
/* driver_find.c: the driver's functions, from libcuda.so.1. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"

typedef struct wanted {
    const char *name;
    size_t offset; /* of its pointer in of_driver */
} wanted;

static const wanted functions[] = {
    {"cuInit", offsetof(of_driver, init)},
    {"cuDriverGetVersion", offsetof(of_driver, driver_version)},
    {"cuGetErrorString", offsetof(of_driver, error_string)},
    {"cuDeviceGetAttribute", offsetof(of_driver, device_attribute)},
    {"cuDeviceGet", offsetof(of_driver, device_get)},
    {"cuCtxGetCurrent", offsetof(of_driver, context_current)},
    {"cuCtxSetCurrent", offsetof(of_driver, context_set_current)},
    {"cuCtxGetDevice", offsetof(of_driver, context_device)},
    {"cuDevicePrimaryCtxRetain", offsetof(of_driver, context_retain)},
    {"cuLibraryLoadData", offsetof(of_driver, library_load)},
    {"cuLibraryGetKernel", offsetof(of_driver, library_kernel)},
    {"cuKernelGetFunction", offsetof(of_driver, kernel_function)},
    {"cuLaunchKernel", offsetof(of_driver, launch)},
    {"cuStreamGetCaptureInfo_v2", offsetof(of_driver, capture_info)},
    {"cuThreadExchangeStreamCaptureMode", offsetof(of_driver, exchange_capture_mode)},
};

_Static_assert(sizeof functions / sizeof *functions == sizeof(of_driver) / sizeof(void (*)(void)),
               "every function of the driver is looked up");

of_cuda_status of_driver_find(of_driver *out, char *why, size_t size) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why, size, "no NVIDIA driver is installed: %s", dlerror());
        return OF_CUDA_NO_DRIVER;
    }
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *function = dlsym(library, functions[i].name);
        if (!function) {
            snprintf(why, size, "the NVIDIA driver is too old: it has no %s", functions[i].name);
            return OF_CUDA_NO_DRIVER;
        }
        memcpy((char *)out + functions[i].offset, &function, sizeof function);
    }
    return OF_CUDA_OK;
}
