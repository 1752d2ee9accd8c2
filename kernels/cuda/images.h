/* SPDX-License-Identifier: BSD-3-Clause */
/* images.h: the compiled kernels in this library. */
#ifndef OPTFUSE_CUDA_IMAGES_H
#define OPTFUSE_CUDA_IMAGES_H

#include "driver.h"

enum { OF_CUDA_TABLE_SIZES = 2 }; /* small, large: see table.h */

/* The kernels that update with one set of used state. */
typedef struct of_cuda_kernels {
    CUkernel size[OF_CUDA_TABLE_SIZES];
} of_cuda_kernels;

/* Loads on the first call for a rule and dtype. NULL if there are none. */
const of_cuda_kernels *of_cuda_find(const of_driver *driver, const char *rule, of_dtype dtype,
                                    unsigned used, of_cuda_status *status);

/* Kernels beside the updates: of advance.cu, of asgd_next.cu; then those of packing.cu, each
 * task of float32 and of float64; and of draw.cu. */
typedef enum of_cuda_single {
    OF_CUDA_ADVANCE,
    OF_CUDA_ASGD_NEXT,
    OF_CUDA_PACKING,
    OF_CUDA_DRAW = OF_CUDA_PACKING + 2 * OF_CUDA_PACKING_TASKS,
    OF_CUDA_SINGLES
} of_cuda_single;
of_cuda_status of_cuda_find_single(const of_driver *driver, of_cuda_single which, CUkernel *kernel);
/* Loads a kernel that was found into the current context. */
of_cuda_status of_cuda_load(const of_driver *driver, CUkernel kernel);
/* OF_CUDA_FAILED if it is not loaded there, OF_CUDA_UNSUPPORTED if the driver does not say. */
of_cuda_status of_cuda_look_loaded(const of_driver *driver, CUkernel kernel);
/* With a thread for each of the n things in its table. */
of_cuda_status of_cuda_launch_single(const of_driver *driver, CUkernel kernel, void *table,
                                     size_t n, void *stream);

#endif
