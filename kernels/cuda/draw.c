/* SPDX-License-Identifier: BSD-3-Clause */
/* draw.c: makes the integers of stochastic rounding on the device. */
#include "images.h"
#include "launch.h"
#include "rules/draws.h"

of_cuda_status of_cuda_draw(const of_gpu_draws *draws, int device, void *stream) {
    of_cuda_status status;
    CUkernel kernel = NULL;
    CUdevice current = 0;
    of_gpu_draws table = *draws;
    const of_driver *driver = of_driver_open(&status);
    if (!driver || draws->n == 0)
        return status;
    status = of_driver_enter(driver, device, &current);
    if (status == OF_CUDA_OK)
        status = of_cuda_find_single(driver, OF_CUDA_DRAW, &kernel);
    const uint32_t shift = of_draw_shift(draws->halves);
    const uint64_t last = (draws->first + draws->n - 1) >> shift;
    const uint64_t lanes = (last - (draws->first >> shift) + 1) * OF_DRAW_LANES;
    return status == OF_CUDA_OK ? of_cuda_launch_single(driver, kernel, &table, lanes, stream)
                                : status;
}
