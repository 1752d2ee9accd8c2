/* SPDX-License-Identifier: BSD-3-Clause */
/* images.c: one fat binary per rule and dtype, loaded when first used. */
#include "images.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "launch.h"

enum { SETS = 2 }; /* of used state, per rule */

typedef struct image {
    const char *rule;
    of_dtype dtype;
    const unsigned long long *code;
    bool loaded;
    of_cuda_kernels kernels[SETS];
} image;

#define OF_IMAGE(rule, dtype) extern const unsigned long long of_image_##rule##_##dtype[]
OF_IMAGE(adam, float32);
OF_IMAGE(adam, float64);
OF_IMAGE(adam, bfloat16);
OF_IMAGE(adam, float16);
OF_IMAGE(scaling, float32);
OF_IMAGE(scaling, float64);
OF_IMAGE(scaling, bfloat16);
OF_IMAGE(scaling, float16);
OF_IMAGE(sgd, float32);
OF_IMAGE(sgd, float64);
OF_IMAGE(sgd, bfloat16);
OF_IMAGE(sgd, float16);
extern const unsigned long long of_image_advance[];

/* guards the fields of `images` and `advance` that loading fills */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static image images[] = {
    {"adam", OF_FLOAT32, of_image_adam_float32, false, {{3, {NULL}}, {7, {NULL}}}},
    {"adam", OF_FLOAT64, of_image_adam_float64, false, {{3, {NULL}}, {7, {NULL}}}},
    {"adam", OF_BFLOAT16, of_image_adam_bfloat16, false, {{3, {NULL}}, {7, {NULL}}}},
    {"adam", OF_FLOAT16, of_image_adam_float16, false, {{3, {NULL}}, {7, {NULL}}}},
    {"scaling", OF_FLOAT32, of_image_scaling_float32, false, {{0, {NULL}}, {0, {NULL}}}},
    {"scaling", OF_FLOAT64, of_image_scaling_float64, false, {{0, {NULL}}, {0, {NULL}}}},
    {"scaling", OF_BFLOAT16, of_image_scaling_bfloat16, false, {{0, {NULL}}, {0, {NULL}}}},
    {"scaling", OF_FLOAT16, of_image_scaling_float16, false, {{0, {NULL}}, {0, {NULL}}}},
    {"sgd", OF_FLOAT32, of_image_sgd_float32, false, {{0, {NULL}}, {1, {NULL}}}},
    {"sgd", OF_FLOAT64, of_image_sgd_float64, false, {{0, {NULL}}, {1, {NULL}}}},
    {"sgd", OF_BFLOAT16, of_image_sgd_bfloat16, false, {{0, {NULL}}, {1, {NULL}}}},
    {"sgd", OF_FLOAT16, of_image_sgd_float16, false, {{0, {NULL}}, {1, {NULL}}}},
};
static CUkernel advance;

static of_cuda_status load_code(const of_driver *driver, const void *code, CUlibrary *library) {
    const CUresult result = driver->library_load(library, code, NULL, NULL, 0, NULL, NULL, 0);
    return result == CUDA_SUCCESS ? OF_CUDA_OK
                                  : of_driver_fail(driver, result, "the kernels do not load");
}

static of_cuda_status get_kernel(const of_driver *driver, CUlibrary library, const char *name,
                                 CUkernel *kernel) {
    const CUresult result = driver->library_kernel(kernel, library, name);
    return result == CUDA_SUCCESS ? OF_CUDA_OK : of_driver_fail(driver, result, name);
}

static of_cuda_status load_image(const of_driver *driver, image *one) {
    static const char *const sizes[OF_CUDA_TABLE_SIZES] = {"small", "large"};
    CUlibrary library = NULL;
    of_cuda_status status = load_code(driver, one->code, &library);
    for (int set = 0; set < SETS; set++)
        for (int size = 0; size < OF_CUDA_TABLE_SIZES && status == OF_CUDA_OK; size++) {
            char name[80];
            snprintf(name, sizeof name, "of_cuda_%s_%s_%u_%s", one->rule,
                     of_cuda_dtype_name(one->dtype), one->kernels[set].used, sizes[size]);
            status = get_kernel(driver, library, name, &one->kernels[set].size[size]);
        }
    one->loaded = status == OF_CUDA_OK;
    return status;
}

const of_cuda_kernels *of_cuda_find(const of_driver *driver, const char *rule, of_dtype dtype,
                                    unsigned used, of_cuda_status *status) {
    for (size_t i = 0; i < sizeof images / sizeof *images; i++) {
        image *one = &images[i];
        if (strcmp(one->rule, rule) != 0 || one->dtype != dtype)
            continue;
        pthread_mutex_lock(&lock);
        *status = one->loaded ? OF_CUDA_OK : load_image(driver, one);
        pthread_mutex_unlock(&lock);
        for (int set = 0; set < SETS && *status == OF_CUDA_OK; set++)
            if (one->kernels[set].used == used)
                return &one->kernels[set];
        if (*status != OF_CUDA_OK)
            return NULL;
    }
    *status =
        of_cuda_fail(OF_CUDA_UNSUPPORTED, "no CUDA kernel for %s, dtype %d", rule, (int)dtype);
    return NULL;
}

of_cuda_status of_cuda_find_advance(const of_driver *driver, CUkernel *kernel) {
    of_cuda_status status = OF_CUDA_OK;
    CUlibrary library = NULL;
    pthread_mutex_lock(&lock);
    if (!advance) {
        status = load_code(driver, of_image_advance, &library);
        if (status == OF_CUDA_OK)
            status = get_kernel(driver, library, "of_cuda_advance_steps", &advance);
    }
    *kernel = advance;
    pthread_mutex_unlock(&lock);
    return status;
}
