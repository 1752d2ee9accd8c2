/* SPDX-License-Identifier: BSD-3-Clause */
/* driver_find.c: the driver's functions, from libcuda.so.1. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"

#define NAME(name, member, takes) name,
static const char *const names[] = {OF_DRIVER(NAME) OF_DRIVER_OPTIONAL(NAME)};
static const char *const required[] = {OF_DRIVER(NAME)};
_Static_assert(sizeof names == sizeof(of_driver), "all members are pointers");

of_cuda_status of_driver_find(of_driver *out, char *why, size_t size) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why, size, "no NVIDIA driver is installed: %s", dlerror());
        return OF_CUDA_NO_DRIVER;
    }
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *function = dlsym(library, names[i]);
        if (!function && i < sizeof required / sizeof *required) {
            snprintf(why, size, "the NVIDIA driver is too old: it has no %s", names[i]);
            return OF_CUDA_NO_DRIVER;
        }
        memcpy((char *)out + i * sizeof function, &function, sizeof function);
    }
    return OF_CUDA_OK;
}
