/* SPDX-License-Identifier: BSD-3-Clause */
/* advance.c: counts steps on the device. */
#include <string.h>

#include "images.h"
#include "launch.h"

of_cuda_status of_cuda_advance(float *const *steps, size_t n_steps, const float *less_at,
                               int device, void *stream) {
    of_cuda_status status;
    CUkernel kernel = NULL;
    CUdevice current = 0;
    const of_driver *driver = of_driver_open(&status);
    if (!driver)
        return status;
    status = of_driver_enter(driver, device, &current);
    if (status == OF_CUDA_OK)
        status = of_cuda_find_single(driver, OF_CUDA_ADVANCE, &kernel);
    for (size_t at = 0; at < n_steps && status == OF_CUDA_OK; at += OF_CUDA_STEPS) {
        const size_t left = n_steps - at;
        of_cuda_steps table;
        table.less_at = less_at;
        table.n = left < OF_CUDA_STEPS ? left : OF_CUDA_STEPS;
        memcpy(table.step, steps + at, table.n * sizeof *steps);
        status = of_cuda_launch_single(driver, kernel, &table, table.n, stream);
    }
    return status;
}
