/* SPDX-License-Identifier: BSD-3-Clause */
/* driver.h: the part of the CUDA driver that launching kernels needs. It is
 * opened at run time, so that the library loads where there is no driver. */
#ifndef OPTFUSE_CUDA_DRIVER_H
#define OPTFUSE_CUDA_DRIVER_H

#include <cuda.h>

#include "cuda_kernels.h"

/* The driver's name of each function, ours, and what it takes; all return a CUresult. */
#define OF_DRIVER(X)                                                                               \
    X("cuInit", init, (unsigned flags))                                                            \
    X("cuDriverGetVersion", driver_version, (int *version))                                        \
    X("cuGetErrorString", error_string, (CUresult error, const char **text))                       \
    X("cuDeviceGetAttribute", device_attribute,                                                    \
      (int *value, CUdevice_attribute attribute, CUdevice device))                                 \
    X("cuDeviceGet", device_get, (CUdevice *device, int ordinal))                                  \
    X("cuCtxGetCurrent", context_current, (CUcontext *context))                                    \
    X("cuCtxSetCurrent", context_set_current, (CUcontext context))                                 \
    X("cuCtxGetDevice", context_device, (CUdevice *device))                                        \
    X("cuDevicePrimaryCtxRetain", context_retain, (CUcontext *context, CUdevice device))           \
    X("cuLibraryLoadData", library_load,                                                           \
      (CUlibrary *library, const void *code, CUjit_option *options, void **values,                 \
       unsigned n_options, CUlibraryOption *library_options, void **library_values,                \
       unsigned n_library_options))                                                                \
    X("cuLibraryGetKernel", library_kernel,                                                        \
      (CUkernel *kernel, CUlibrary library, const char *name))                                     \
    X("cuKernelGetFunction", kernel_function, (CUfunction *function, CUkernel kernel))             \
    X("cuLaunchKernel", launch,                                                                    \
      (CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,                     \
       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,                \
       CUstream stream, void **parameters, void **extra))                                          \
    X("cuStreamGetCaptureInfo_v2", capture_info,                                                   \
      (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,             \
       const CUgraphNode **dependencies, size_t *n_dependencies))                                  \
    X("cuThreadExchangeStreamCaptureMode", exchange_capture_mode, (CUstreamCaptureMode *mode))

/* Functions that older drivers lack; NULL there. Both are of CUDA 12.4; the state is 1 if the
 * function is loaded, by an enumeration that older headers lack. */
#define OF_DRIVER_OPTIONAL(X)                                                                      \
    X("cuFuncLoad", function_load, (CUfunction function))                                          \
    X("cuFuncIsLoaded", function_is_loaded, (int *state, CUfunction function))

#define OF_DRIVER_MEMBER(name, member, takes) CUresult(*member) takes;
typedef struct of_driver {
    OF_DRIVER(OF_DRIVER_MEMBER)
    OF_DRIVER_OPTIONAL(OF_DRIVER_MEMBER)
} of_driver;

/* Finds the driver and fills *out; on failure says why in `why`. Tests put
 * another in its place. */
of_cuda_status of_driver_find(of_driver *out, char *why, size_t size);

/* The opened driver, or NULL and this thread's error is set. */
const of_driver *of_driver_open(of_cuda_status *status);

/* Whether the opened driver can't load what this toolkit made for a chip, only older PTX. */
bool of_driver_is_older(void);

/* Makes the device's primary context current if none is, and keeps it for the life of the
 * process. OF_CUDA_INVALID if another device's is current. */
of_cuda_status of_driver_enter(const of_driver *driver, int ordinal, CUdevice *device);

/* Sets this thread's error and returns `status`. */
of_cuda_status of_cuda_fail(of_cuda_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
of_cuda_status of_driver_fail(const of_driver *driver, CUresult result, const char *what);

#endif
