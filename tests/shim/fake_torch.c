/* SPDX-License-Identifier: BSD-3-Clause */
/* fake_torch.c: the one function of libtorch_cuda.so that is used. */
#include "fake.h"

#include <stdlib.h>

FAKE_API int32_t torch_get_current_cuda_blas_handle(void **out) {
    if (getenv("FAKE_TORCH_FAILS"))
        return 1;
    *out = FAKE_HANDLE;
    return 0;
}

#ifdef FAKE_LINKED
/* Something of cuBLAS must be used for the linker to record that it is needed. */
int cublasSgemm_v2(void *, int, int, int, int, int, const float *, const float *, int,
                   const float *, int, const float *, float *, int);
FAKE_API void *fake_use(void);
FAKE_API void *fake_use(void) {
    return (void *)(intptr_t)&cublasSgemm_v2;
}
#endif
