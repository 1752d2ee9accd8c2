/* SPDX-License-Identifier: BSD-3-Clause */
/* fake_torch.c: the functions of libtorch_cuda.so that are used. */
#include "fake.h"

#include <stdbool.h>
#include <stdlib.h>

FAKE_API int32_t torch_get_current_cuda_blas_handle(void **out) {
    if (getenv("FAKE_TORCH_FAILS"))
        return 1;
    *out = FAKE_HANDLE;
    return 0;
}

/* As the C++ compiler calls at::cuda::tunable::getTuningContext(), and
 * TuningContext::IsTunableOpEnabled() const, here without a class. */
FAKE_API void *tuning(void) __asm__("_ZN2at4cuda7tunable16getTuningContextEv");
FAKE_API bool
is_tuning(const void *context) __asm__("_ZNK2at4cuda7tunable13TuningContext18IsTunableOpEnabledEv");

static int the_context;

void *tuning(void) {
    return &the_context;
}

bool is_tuning(const void *context) {
    return context == &the_context && getenv("FAKE_TORCH_TUNES");
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
