/* SPDX-License-Identifier: BSD-3-Clause */
/* driver.h: the part of the CUDA driver that launching kernels needs. It is
 * opened at run time, so that the library loads where there is no driver. */
#ifndef OPTFUSE_CUDA_DRIVER_H
#define OPTFUSE_CUDA_DRIVER_H

#include <cuda.h>

#include "cuda_kernels.h"

typedef struct of_driver {
    CUresult (*init)(unsigned flags);
    CUresult (*driver_version)(int *version);
    CUresult (*error_string)(CUresult error, const char **text);
    CUresult (*device_attribute)(int *value, CUdevice_attribute attribute, CUdevice device);
    CUresult (*device_get)(CUdevice *device, int ordinal);
    CUresult (*context_current)(CUcontext *context);
    CUresult (*context_set_current)(CUcontext context);
    CUresult (*context_device)(CUdevice *device);
    CUresult (*context_retain)(CUcontext *context, CUdevice device);
    CUresult (*library_load)(CUlibrary *library, const void *code, CUjit_option *options,
                             void **values, unsigned n_options, CUlibraryOption *library_options,
                             void **library_values, unsigned n_library_options);
    CUresult (*library_kernel)(CUkernel *kernel, CUlibrary library, const char *name);
    CUresult (*kernel_function)(CUfunction *function, CUkernel kernel);
    CUresult (*launch)(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                       CUstream stream, void **parameters, void **extra);
    CUresult (*capture_info)(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                             CUgraph *graph, const CUgraphNode **dependencies,
                             size_t *n_dependencies);
    CUresult (*exchange_capture_mode)(CUstreamCaptureMode *mode);
} of_driver;

/* Finds the driver and fills *out; on failure says why in `why`. Tests put
 * another in its place. */
of_cuda_status of_driver_find(of_driver *out, char *why, size_t size);

/* The opened driver, or NULL and this thread's error is set. */
const of_driver *of_driver_open(of_cuda_status *status);

/* Makes a context current if none is, and tells the current one's device. */
of_cuda_status of_driver_enter(const of_driver *driver, int ordinal, CUdevice *device);

/* Sets this thread's error and returns `status`. */
of_cuda_status of_cuda_fail(of_cuda_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
of_cuda_status of_driver_fail(const of_driver *driver, CUresult result, const char *what);

#endif
