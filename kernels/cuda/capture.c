/* SPDX-License-Identifier: BSD-3-Clause */
/* capture.c: what is known of graphs that are being captured. */
#include "driver.h"

of_cuda_status of_cuda_capture(int device, void *stream, uint64_t *id) {
    of_cuda_status status;
    CUstreamCaptureStatus capturing = CU_STREAM_CAPTURE_STATUS_NONE;
    CUdevice entered = 0;
    cuuint64_t graph = 0;
    const of_driver *driver = of_driver_open(&status);
    *id = 0;
    if (!driver)
        return status;
    CUresult result = driver->capture_info((CUstream)stream, &capturing, &graph, NULL, NULL, NULL);
    if (result == CUDA_ERROR_INVALID_CONTEXT) { /* a thread that has done nothing with CUDA yet */
        status = of_driver_enter(driver, device, &entered);
        if (status != OF_CUDA_OK)
            return status;
        result = driver->capture_info((CUstream)stream, &capturing, &graph, NULL, NULL, NULL);
    }
    /* Asked of the legacy default stream while another one is capturing: it
     * can't be captured itself. */
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        return OF_CUDA_OK;
    if (result != CUDA_SUCCESS)
        return of_driver_fail(driver, result, "the state of a stream");
    if (capturing != CU_STREAM_CAPTURE_STATUS_NONE)
        *id = graph;
    return OF_CUDA_OK;
}

void of_cuda_relax(bool on) {
    static _Thread_local CUstreamCaptureMode before;
    static _Thread_local unsigned depth;
    of_cuda_status status;
    const of_driver *driver = of_driver_open(&status);
    if (!driver)
        return;
    if (on && depth++ == 0) {
        before = CU_STREAM_CAPTURE_MODE_RELAXED;
        driver->exchange_capture_mode(&before);
    } else if (!on && --depth == 0) {
        driver->exchange_capture_mode(&before);
    }
}
