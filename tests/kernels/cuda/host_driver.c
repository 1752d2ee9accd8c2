/* SPDX-License-Identifier: BSD-3-Clause */
#include "host_driver.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/driver.h"
#include "cuda/table.h"
#include "host_device.h"
#include "rules/adam_mixed.h"
#include "rules/scaling.h"

_Thread_local host_index host_block_index, host_block_size, host_thread_index;
_Thread_local unsigned host_phase;
_Thread_local unsigned char *host_shared;
_Thread_local size_t host_shared_bytes;

host_driver host = {.version = 13000, .major = 9, .multiprocessors = 2};
_Thread_local bool host_context;

enum { MOST_SHARED = 48 << 10 }; /* of a kernel that has not asked for more */

typedef void kernel_fn(const void *table);

typedef struct kernel_row {
    const char *name;
    kernel_fn *run;
    size_t bytes;      /* of its arguments */
    unsigned barriers; /* that all threads of a block pass */
} kernel_row;

/* Each set of used state has a kernel for both sizes of table. */
#define DTYPES(SETS, X, rule)                                                                      \
    SETS(X, rule, float32) SETS(X, rule, float64) SETS(X, rule, bfloat16) SETS(X, rule, float16)
#define DTYPES_FUSED DTYPES
#define DTYPES_OP_BY_OP DTYPES
#define DTYPES_PROGRAM DTYPES
#define DTYPES_ROUNDED(SETS, X, rule)                                                              \
    SETS(X, rule, float32) SETS(X, rule, bfloat16) SETS(X, rule, float16)
#define DTYPES_NONE(sets, X, rule)

/* The "code" of an image is its name, and says whether it is that for older drivers. */
#define IMAGE(name)                                                                                \
    extern const unsigned long long of_image_##name[], of_image_older_##name[];                    \
    const unsigned long long of_image_##name[] = {0}, of_image_older_##name[] = {1};
#define IMAGES(rule)                                                                               \
    IMAGE(rule##_float32) IMAGE(rule##_float64) IMAGE(rule##_bfloat16) IMAGE(rule##_float16)
#define IMAGES_FUSED IMAGES
#define IMAGES_OP_BY_OP IMAGES
#define IMAGES_PROGRAM IMAGES
#define IMAGES_ROUNDED(rule) IMAGE(rule##_float32) IMAGE(rule##_bfloat16) IMAGE(rule##_float16)
#define IMAGES_NONE(rule)
#define DECLARE(rule, dtype, used)                                                                 \
    kernel_fn of_cuda_##rule##_##dtype##_##used##_small, of_cuda_##rule##_##dtype##_##used##_large;

#define ROW(name, size) {#name, name, sizeof(of_cuda_##size##_table), 0},
#define ROWS(rule, dtype, used)                                                                    \
    ROW(of_cuda_##rule##_##dtype##_##used##_small, small)                                          \
    ROW(of_cuda_##rule##_##dtype##_##used##_large, large)

#define OF_RULE(rule, RULE, cpu, gpu, form, steps)                                                 \
    IMAGES_##gpu(rule) DTYPES_##gpu(RULE##_SETS, DECLARE, rule)
#include "rules.def"
IMAGES(scaling)
IMAGE(adam_mixed_float32)
IMAGE(advance)
IMAGE(asgd_next)
IMAGE(draw)
IMAGE(packing_float32)
IMAGE(packing_float64)
DTYPES(SCALING_SETS, DECLARE, scaling)
ADAM_MIXED_SETS(DECLARE, adam_mixed, float32)
kernel_fn of_cuda_advance_steps, of_cuda_asgd_next, of_cuda_draw_integers;
kernel_fn of_cuda_packing_add_float32, of_cuda_packing_add_float64;
kernel_fn of_cuda_packing_merge_float32, of_cuda_packing_merge_float64;
kernel_fn of_cuda_packing_unpack_float32, of_cuda_packing_unpack_float64;
#define PACKING(name, barriers) {#name, name, sizeof(of_cuda_packing_table), barriers}

static const kernel_row rows[] = {
#define OF_RULE(rule, RULE, cpu, gpu, form, steps) DTYPES_##gpu(RULE##_SETS, ROWS, rule)
#include "rules.def"
    DTYPES(SCALING_SETS, ROWS, scaling) ADAM_MIXED_SETS(ROWS, adam_mixed, float32)
    {"of_cuda_advance_steps", of_cuda_advance_steps, sizeof(of_cuda_steps), 0},
    {"of_cuda_asgd_next", of_cuda_asgd_next, sizeof(of_cuda_numbers), 0},
    {"of_cuda_draw_integers", of_cuda_draw_integers, sizeof(of_gpu_draws), 0},
    PACKING(of_cuda_packing_add_float32, 0),
    PACKING(of_cuda_packing_merge_float32, 0),
    PACKING(of_cuda_packing_unpack_float32, 1),
    PACKING(of_cuda_packing_add_float64, 0),
    PACKING(of_cuda_packing_merge_float64, 0),
    PACKING(of_cuda_packing_unpack_float64, 1)};

static CUresult host_init(unsigned flags) {
    (void)flags;
    return CUDA_SUCCESS;
}

static CUresult host_version(int *version) {
    *version = host.version;
    return CUDA_SUCCESS;
}

static CUresult host_error_string(CUresult error, const char **text) {
    (void)error;
    *text = "a failure made by the test";
    return CUDA_SUCCESS;
}

static CUresult host_attribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    (void)device;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        *value = host.major;
        return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        *value = host.multiprocessors;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

static CUresult host_device_get(CUdevice *device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}

static CUresult host_current(CUcontext *context) {
    *context = host_context ? (CUcontext)&host : NULL;
    return CUDA_SUCCESS;
}

static CUresult host_set_current(CUcontext context) {
    host_context = context == (CUcontext)&host;
    return CUDA_SUCCESS;
}

static CUresult host_context_device(CUdevice *device) {
    *device = host.device_now ? host.device_now() : host.device;
    return host_context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult host_retain(CUcontext *context, CUdevice device) {
    (void)device;
    host.retained++;
    *context = (CUcontext)&host;
    return CUDA_SUCCESS;
}

static CUresult host_load(CUlibrary *library, const void *code, CUjit_option *options,
                          void **values, unsigned n_options, CUlibraryOption *library_options,
                          void **library_values, unsigned n_library_options) {
    (void)options, (void)values, (void)n_options;
    (void)library_options, (void)library_values, (void)n_library_options;
    *library = (CUlibrary)(uintptr_t)code;
    host.loaded_older = *(const unsigned long long *)code != 0;
    return (CUresult)host.fail_load;
}

static CUresult host_kernel(CUkernel *kernel, CUlibrary library, const char *name) {
    (void)library;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (strcmp(rows[i].name, name) == 0) {
            *kernel = (CUkernel)(uintptr_t)&rows[i];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}

static void append_name(char *to, size_t size, const kernel_row *row) {
    const size_t length = strlen(to);
    snprintf(to + length, size - length, "%s ", row->name);
}

static CUresult host_function(CUfunction *function, CUkernel kernel) {
    append_name(host.found, sizeof host.found, (const kernel_row *)kernel);
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

static CUresult host_function_load(CUfunction function) {
    append_name(host.loaded, sizeof host.loaded, (const kernel_row *)function);
    return CUDA_SUCCESS;
}

static CUresult host_is_loaded(int *state, CUfunction function) {
    const kernel_row *row = (const kernel_row *)function;
    const char *found = strstr(host.loaded, row->name);
    *state = found && found[strlen(row->name)] == ' ';
    return CUDA_SUCCESS;
}

/* The i-th of n numbers in this order. The primes are larger than n and so divide it not. */
static unsigned in_order(unsigned i, unsigned n) {
    static const uint64_t primes[] = {1000003, 1000033, 1000037};
    if (host.order < 2)
        return host.order ? n - 1 - i : i;
    return (unsigned)(i * primes[host.order - 2] % n);
}

/* Shared memory is of no use before it is written: a number that no test has. */
static void run_block(const kernel_row *row, const void *table, unsigned block, unsigned threads) {
    memset(host_shared, 0xa5, host_shared_bytes);
    host_block_index.x = block;
    host_block_size.x = threads;
    for (host_phase = 0; host_phase <= row->barriers; host_phase++) {
        for (unsigned i = 0; i < threads; i++) {
            host_thread_index.x = in_order(i, threads);
            row->run(table);
        }
        if (host.met)
            host.met(threads, host_phase == row->barriers);
    }
}

/* The arguments and no byte more, so that a sanitizer sees what lies beyond. So it is with shared
 * memory. */
struct host_work {
    const kernel_row *row;
    unsigned blocks, threads, shared_bytes;
    void *table;
};

static void *allocated(size_t bytes) {
    void *memory = malloc(bytes);
    if (!memory) {
        perror("launch");
        exit(2);
    }
    return memory;
}

void host_run(const host_work *work, void *stream) {
    const kernel_row *row = work->row;
    host.stream = stream;
    host_shared_bytes = work->shared_bytes;
    host_shared = allocated(work->shared_bytes ? work->shared_bytes : 1);
    if (host.launching)
        host.launching(row->name, work->table, row->bytes);
    for (unsigned block = 0; block < work->blocks; block++)
        run_block(row, work->table, in_order(block, work->blocks), work->threads);
    if (host.launched)
        host.launched(row->name, work->table, stream);
    free(host_shared);
}

static CUresult host_launch(CUfunction function, unsigned x, unsigned y, unsigned z,
                            unsigned threads, unsigned threads_y, unsigned threads_z,
                            unsigned shared_bytes, CUstream stream, void **parameters,
                            void **extra) {
    const kernel_row *row = (const kernel_row *)function;
    if (y != 1 || z != 1 || threads_y != 1 || threads_z != 1 || extra || !x ||
        shared_bytes > MOST_SHARED)
        return CUDA_ERROR_INVALID_VALUE;
    host.launches++;
    if ((size_t)host.fail_launch == host.launches)
        return CUDA_ERROR_LAUNCH_FAILED;
    host.blocks = x;
    host.bytes = row->bytes;
    host_work *work = allocated(sizeof *work);
    *work = (host_work){row, x, threads, shared_bytes, allocated(row->bytes)};
    memcpy(work->table, parameters[0], row->bytes);
    host_run(work, stream);
    if (host.keep && host.keep(work, stream))
        return CUDA_SUCCESS;
    free(work->table);
    free(work);
    return CUDA_SUCCESS;
}

static CUresult host_capture_info(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                  CUgraph *graph, const CUgraphNode **dependencies,
                                  size_t *n_dependencies) {
    const cuuint64_t given = (void *)stream == host.captured ? host.graph : 0;
    const cuuint64_t found = host.graph_of ? host.graph_of(stream) : given;
    const bool captured = found != 0;
    if (!host_context)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (graph || dependencies || n_dependencies)
        return CUDA_ERROR_INVALID_VALUE;
    if (!captured && host.implicit)
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    *status = captured ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    *id = found;
    return CUDA_SUCCESS;
}

static CUresult host_exchange(CUstreamCaptureMode *mode) {
    const int before = host.mode;
    host.mode = (int)*mode;
    *mode = (CUstreamCaptureMode)before;
    return CUDA_SUCCESS;
}

of_cuda_status of_driver_find(of_driver *out, char *why, size_t size) {
    const of_driver driver = {host_init,         host_version,
                              host_error_string, host_attribute,
                              host_device_get,   host_current,
                              host_set_current,  host_context_device,
                              host_retain,       host_load,
                              host_kernel,       host_function,
                              host_launch,       host_capture_info,
                              host_exchange,     host.no_function_load ? NULL : host_function_load,
                              host.no_function_load ? NULL : host_is_loaded};
    snprintf(why, size, "the test took the driver away");
    *out = driver;
    return host.missing ? OF_CUDA_NO_DRIVER : OF_CUDA_OK;
}
