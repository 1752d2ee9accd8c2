/* SPDX-License-Identifier: BSD-3-Clause */
/* blas_find.c: cuBLAS as it is in this process. The handle belongs to the copy
 * that PyTorch links, so nothing is loaded that is not there, and among several
 * copies PyTorch's own is taken. */
#include "matrix/blas_find.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "optfuse.h"

static const char torch_library[] = "libtorch_cuda.so";
static const char *const cublas_libraries[] = {"libcublas.so.13", "libcublas.so.12"};

typedef struct wanted {
    const char *name;
    size_t offset; /* of its pointer in of_blas */
} wanted;

/* C++ functions of PyTorch, by their names for the linker. */
static const wanted of_torch[] = {
    {"torch_get_current_cuda_blas_handle", offsetof(of_blas, handle)},
    {"_ZN2at4cuda7tunable16getTuningContextEv", offsetof(of_blas, tuning)},
    {"_ZNK2at4cuda7tunable13TuningContext18IsTunableOpEnabledEv", offsetof(of_blas, is_tuning)},
};
static const wanted functions[] = {
    {"cublasSetMathMode", offsetof(of_blas, set_math_mode)},
    {"cublasSgemm_v2", offsetof(of_blas, sgemm)},
    {"cublasDgemm_v2", offsetof(of_blas, dgemm)},
    {"cublasGemmEx", offsetof(of_blas, gemm_ex)},
    {"cublasGetStatusString", offsetof(of_blas, status_string)},
};

/* guards the two below */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static of_blas blas;
static bool found;

static void put(of_blas *out, size_t offset, void *function) {
    memcpy((char *)out + offset, &function, sizeof function);
}

/* Loaded libraries only; a handle, once opened, is kept for the process. */
static void *loaded(const char *name) {
    return dlopen(name, RTLD_LAZY | RTLD_NOLOAD);
}

/* PyTorch's library first: dlsym() looks through what it was linked with, too. */
static void *cublas_of(void *torch) {
    if (dlsym(torch, functions[0].name))
        return torch;
    for (size_t i = 0; i < sizeof cublas_libraries / sizeof *cublas_libraries; i++) {
        void *library = loaded(cublas_libraries[i]);
        if (library)
            return library;
    }
    return NULL;
}

/* The first of n functions that the library lacks; NULL: all are put into `out`. */
static const char *lacks(void *library, const wanted *some, size_t n, of_blas *out) {
    for (size_t i = 0; i < n; i++) {
        void *function = dlsym(library, some[i].name);
        if (!function)
            return some[i].name;
        put(out, some[i].offset, function);
    }
    return NULL;
}

static bool find(of_blas *out) {
    void *torch = loaded(torch_library);
    if (!torch) {
        of_set_error("matrix products on a GPU need PyTorch's CUDA library (%s), which is not "
                     "loaded: install a PyTorch built with CUDA",
                     torch_library);
        return false;
    }
    const char *missing = lacks(torch, of_torch, sizeof of_torch / sizeof *of_torch, out);
    void *cublas = cublas_of(torch);
    if (missing || !cublas) {
        of_set_error("matrix products on a GPU need %s, which is not in this process: use the "
                     "PyTorch release that optfuse was built for",
                     missing ? missing : "cuBLAS 12 or 13");
        return false;
    }
    missing = lacks(cublas, functions, sizeof functions / sizeof *functions, out);
    if (missing)
        of_set_error("PyTorch's cuBLAS has no %s: it is too old", missing);
    return !missing;
}

const of_blas *of_blas_find(void) {
    pthread_mutex_lock(&lock);
    if (!found)
        found = find(&blas);
    const bool there = found;
    pthread_mutex_unlock(&lock);
    return there ? &blas : NULL;
}
