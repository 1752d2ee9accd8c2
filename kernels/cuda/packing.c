/* SPDX-License-Identifier: BSD-3-Clause */
/* packing.c: launches the kernels of packing.cu. */
#include "images.h"
#include "launch.h"

static of_cuda_status find(const of_driver *driver, of_cuda_packing_task task, of_dtype dtype,
                           CUkernel *kernel) {
    const int first = dtype == OF_FLOAT64 ? OF_CUDA_PACKING + OF_CUDA_PACKING_TASKS
                                          : OF_CUDA_PACKING;
    return of_cuda_find_single(driver, (of_cuda_single)(first + (int)task), kernel);
}

static of_cuda_status begin(of_dtype dtype, int device, const of_driver **driver) {
    of_cuda_status status;
    CUdevice current = 0;
    *driver = of_driver_open(&status);
    if (!*driver)
        return status;
    if (dtype != OF_FLOAT32 && dtype != OF_FLOAT64)
        return of_cuda_fail(OF_CUDA_UNSUPPORTED, "no kernel packs %s", of_dtype_name(dtype));
    return of_driver_enter(*driver, device, &current);
}

of_cuda_status of_cuda_prepare_packing(of_dtype dtype, int device) {
    const of_driver *driver = NULL;
    CUkernel kernel = NULL;
    of_cuda_status status = begin(dtype, device, &driver);
    for (int task = 0; task < OF_CUDA_PACKING_TASKS && status == OF_CUDA_OK; task++) {
        status = find(driver, (of_cuda_packing_task)task, dtype, &kernel);
        if (status == OF_CUDA_OK)
            status = of_cuda_load(driver, kernel);
    }
    return status;
}

static const char *fault(const of_cuda_packing *packing) {
    const size_t size = of_dtype_size(packing->dtype);
    const bool is_matrix = packing->task != OF_CUDA_PACKING_MERGE;
    if ((unsigned)packing->task >= OF_CUDA_PACKING_TASKS)
        return "an unknown task";
    if (!packing->to || (uintptr_t)packing->to % size != 0 || !packing->from ||
        (uintptr_t)packing->from % size != 0)
        return "an array is misplaced";
    if (is_matrix && packing->ld < packing->n)
        return "rows overlap";
    if (is_matrix && packing->n > OF_CUDA_MOST_ROWS)
        return "too many rows";
    return NULL;
}

static size_t blocks_of(const of_cuda_packing *packing) {
    const size_t tiles = (packing->n + OF_CUDA_TILE - 1) / OF_CUDA_TILE;
    switch (packing->task) {
    case OF_CUDA_PACKING_ADD:
        return (packing->n + 1) / 2;
    case OF_CUDA_PACKING_UNPACK:
        return (tiles + 1) / 2 * (tiles + 1);
    default:
        return (packing->n + OF_CUDA_MERGED - 1) / OF_CUDA_MERGED;
    }
}

of_cuda_status of_cuda_pack(const of_cuda_packing *packing) {
    const of_driver *driver = NULL;
    CUkernel kernel = NULL;
    of_cuda_status status = begin(packing->dtype, packing->device, &driver);
    if (status != OF_CUDA_OK || packing->n == 0)
        return status;
    const char *why = fault(packing);
    if (why)
        return of_cuda_fail(OF_CUDA_INVALID, "packing: %s", why);
    of_cuda_packing_table table = {.to = packing->to,
                                   .from = packing->from,
                                   .n = packing->n,
                                   .ld = packing->ld,
                                   .numbers = {packing->numbers[0], packing->numbers[1]}};
    status = find(driver, packing->task, packing->dtype, &kernel);
    if (status != OF_CUDA_OK)
        return status;
    return of_cuda_launch_single(driver, kernel, &table, blocks_of(packing) * OF_CUDA_THREADS,
                                 packing->stream);
}
