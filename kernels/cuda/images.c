/* SPDX-License-Identifier: BSD-3-Clause */
/* images.c: one fat binary per rule and dtype, loaded when first used. Kernels are
 * looked up by their names, for each set of state when it is first used. */
#include "images.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "launch.h"

enum { SETS = 1 << OF_FORMULA_STATE }; /* of used state; that of programs is in the last place */

typedef struct image {
    const char *rule;
    of_dtype dtype;
    const unsigned long long *code, *older;
    CUlibrary library; /* NULL: not loaded yet */
    of_cuda_kernels kernels[SETS];
} image;

/* Beside the code for drivers of this toolkit's release is PTX for older ones (older_ptx.py), or
 * NULL. */
#ifdef OF_CUDA_OLDER
#define OF_CODE_OF(name) extern const unsigned long long of_image_##name[], of_image_older_##name[];
#define OF_CODE(name) of_image_##name, of_image_older_##name
#else
#define OF_CODE_OF(name) extern const unsigned long long of_image_##name[];
#define OF_CODE(name) of_image_##name, NULL
#endif

#define OF_DECLARE(rule)                                                                           \
    OF_CODE_OF(rule##_float32)                                                                     \
    OF_CODE_OF(rule##_float64)                                                                     \
    OF_CODE_OF(rule##_bfloat16)                                                                    \
    OF_CODE_OF(rule##_float16)
#define OF_IMAGE(rule, dtype, code) {#rule, code, OF_CODE(rule##_##dtype), NULL, {{{NULL}}}},
#define OF_IMAGES(rule)                                                                            \
    OF_IMAGE(rule, float32, OF_FLOAT32)                                                            \
    OF_IMAGE(rule, float64, OF_FLOAT64)                                                            \
    OF_IMAGE(rule, bfloat16, OF_BFLOAT16)                                                          \
    OF_IMAGE(rule, float16, OF_FLOAT16)

#define OF_DECLARE_FUSED OF_DECLARE
#define OF_DECLARE_OP_BY_OP OF_DECLARE
#define OF_DECLARE_PROGRAM OF_DECLARE
#define OF_DECLARE_ROUNDED(rule)                                                                   \
    OF_CODE_OF(rule##_float32) OF_CODE_OF(rule##_bfloat16) OF_CODE_OF(rule##_float16)
#define OF_DECLARE_NONE(rule)
#define OF_RULE(rule, RULE, cpu, gpu, form, steps) OF_DECLARE_##gpu(rule)
#include "rules.def"
OF_DECLARE(scaling)
OF_CODE_OF(adam_mixed_float32)
OF_CODE_OF(advance)
OF_CODE_OF(asgd_next)
OF_CODE_OF(draw)
OF_CODE_OF(packing_float32)
OF_CODE_OF(packing_float64)

typedef struct single {
    const unsigned long long *code, *older;
    const char *name;
    CUlibrary library; /* NULL: not loaded yet */
    CUkernel kernel;
} single;

/* guards the fields of `images` and `singles` that loading fills */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
#define OF_IMAGES_FUSED OF_IMAGES
#define OF_IMAGES_OP_BY_OP OF_IMAGES
#define OF_IMAGES_PROGRAM OF_IMAGES
#define OF_IMAGES_ROUNDED(rule)                                                                    \
    OF_IMAGE(rule, float32, OF_FLOAT32)                                                            \
    OF_IMAGE(rule, bfloat16, OF_BFLOAT16)                                                          \
    OF_IMAGE(rule, float16, OF_FLOAT16)
#define OF_IMAGES_NONE(rule)
static image images[] = {
#define OF_RULE(rule, RULE, cpu, gpu, form, steps) OF_IMAGES_##gpu(rule)
#include "rules.def"
    OF_IMAGES(scaling) OF_IMAGE(adam_mixed, float32, OF_FLOAT32)};
static single singles[OF_CUDA_SINGLES] = {
    [OF_CUDA_ADVANCE] = {OF_CODE(advance), "of_cuda_advance_steps", NULL, NULL},
    [OF_CUDA_ASGD_NEXT] = {OF_CODE(asgd_next), "of_cuda_asgd_next", NULL, NULL},
    [OF_CUDA_DRAW] = {OF_CODE(draw), "of_cuda_draw_integers", NULL, NULL},
#define OF_PACKING(at, task, dtype)                                                                \
    [OF_CUDA_PACKING + (at)] = {OF_CODE(packing_##dtype), "of_cuda_packing_" #task "_" #dtype,     \
                                NULL, NULL}
    OF_PACKING(0, add, float32), OF_PACKING(1, merge, float32), OF_PACKING(2, unpack, float32),
    OF_PACKING(3, add, float64), OF_PACKING(4, merge, float64), OF_PACKING(5, unpack, float64)};

static of_cuda_status load_code(const of_driver *driver, const void *code, const void *older,
                                CUlibrary *library) {
    const CUresult result = driver->library_load(library, of_driver_is_older() ? older : code, NULL,
                                                 NULL, 0, NULL, NULL, 0);
    if (result == CUDA_ERROR_UNSUPPORTED_PTX_VERSION)
        return of_cuda_fail(OF_CUDA_FAILED,
                            "this GPU is newer than those that the kernels were compiled for, and "
                            "the driver is too old to compile them: update the driver, or build "
                            "optfuse for this GPU (-Dcudaarch)");
    return result == CUDA_SUCCESS ? OF_CUDA_OK
                                  : of_driver_fail(driver, result, "the kernels do not load");
}

static of_cuda_status get_kernel(const of_driver *driver, CUlibrary library, const char *name,
                                 CUkernel *kernel) {
    const CUresult result = driver->library_kernel(kernel, library, name);
    return result == CUDA_SUCCESS ? OF_CUDA_OK : of_driver_fail(driver, result, name);
}

static of_cuda_kernels *kernels_of(image *one, unsigned used) {
    return &one->kernels[used & (SETS - 1)];
}

static of_cuda_status load_kernels(const of_driver *driver, image *one, unsigned used) {
    static const char *const sizes[OF_CUDA_TABLE_SIZES] = {"small", "large"};
    of_cuda_status status = OF_CUDA_OK;
    if (!one->library)
        status = load_code(driver, one->code, one->older, &one->library);
    for (int size = 0; size < OF_CUDA_TABLE_SIZES && status == OF_CUDA_OK; size++) {
        char name[80];
        snprintf(name, sizeof name, "of_cuda_%s_%s_%u_%s", one->rule,
                 of_dtype_name(one->dtype), used, sizes[size]);
        status = get_kernel(driver, one->library, name, &kernels_of(one, used)->size[size]);
    }
    if (status != OF_CUDA_OK)
        *kernels_of(one, used) = (of_cuda_kernels){{NULL}};
    return status;
}

const of_cuda_kernels *of_cuda_find(const of_driver *driver, const char *rule, of_dtype dtype,
                                    unsigned used, of_cuda_status *status) {
    for (size_t i = 0; i < sizeof images / sizeof *images; i++) {
        image *one = &images[i];
        if (strcmp(one->rule, rule) != 0 || one->dtype != dtype)
            continue;
        pthread_mutex_lock(&lock);
        *status = kernels_of(one, used)->size[0] ? OF_CUDA_OK : load_kernels(driver, one, used);
        pthread_mutex_unlock(&lock);
        return *status == OF_CUDA_OK ? kernels_of(one, used) : NULL;
    }
    *status =
        of_cuda_fail(OF_CUDA_UNSUPPORTED, "no CUDA kernel for %s, dtype %d", rule, (int)dtype);
    return NULL;
}

of_cuda_status of_cuda_find_single(const of_driver *driver, of_cuda_single which,
                                   CUkernel *kernel) {
    of_cuda_status status = OF_CUDA_OK;
    single *one = &singles[which];
    pthread_mutex_lock(&lock);
    for (int i = 0; i < OF_CUDA_SINGLES && !one->library; i++)
        if (singles[i].code == one->code)
            one->library = singles[i].library;
    if (!one->library)
        status = load_code(driver, one->code, one->older, &one->library);
    if (status == OF_CUDA_OK && !one->kernel)
        status = get_kernel(driver, one->library, one->name, &one->kernel);
    *kernel = one->kernel;
    pthread_mutex_unlock(&lock);
    return status;
}

of_cuda_status of_cuda_load(const of_driver *driver, CUkernel kernel) {
    CUfunction function;
    CUresult result = driver->kernel_function(&function, kernel);
    if (result == CUDA_SUCCESS && driver->function_load) /* else at its first launch */
        result = driver->function_load(function);
    return result == CUDA_SUCCESS ? OF_CUDA_OK
                                  : of_driver_fail(driver, result, "a kernel does not load");
}

of_cuda_status of_cuda_look_loaded(const of_driver *driver, CUkernel kernel) {
    CUfunction function;
    int state = 0;
    if (!driver->function_is_loaded)
        return of_cuda_fail(OF_CUDA_UNSUPPORTED,
                            "the driver does not say which kernels are loaded");
    CUresult result = driver->kernel_function(&function, kernel);
    if (result == CUDA_SUCCESS)
        result = driver->function_is_loaded(&state, function);
    if (result != CUDA_SUCCESS)
        return of_driver_fail(driver, result, "is a kernel loaded?");
    return state == 1 ? OF_CUDA_OK : of_cuda_fail(OF_CUDA_FAILED, "a kernel is not loaded");
}

of_cuda_status of_cuda_launch_single(const of_driver *driver, CUkernel kernel, void *table,
                                     size_t n, void *stream) {
    void *parameters[] = {table};
    const unsigned blocks = (unsigned)((n + OF_CUDA_THREADS - 1) / OF_CUDA_THREADS);
    const CUresult result = driver->launch((CUfunction)kernel, blocks, 1, 1, OF_CUDA_THREADS, 1, 1,
                                           0, (CUstream)stream, parameters, NULL);
    return result == CUDA_SUCCESS ? OF_CUDA_OK : of_driver_fail(driver, result, "launch");
}
