/* SPDX-License-Identifier: BSD-3-Clause */
/* host_driver.h: a CUDA driver for the tests, which runs kernels on the CPU:
 * blocks and threads are loops, and it keeps count. */
#ifndef OPTFUSE_TEST_HOST_DRIVER_H
#define OPTFUSE_TEST_HOST_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct host_work host_work; /* a launch with its arguments */

typedef struct host_driver {
    int version; /* what it says it supports, 13000 for CUDA 13.0 */
    int major;   /* the chip's compute capability */
    int multiprocessors;
    bool missing;
    int device;   /* whose context is current */
    int (*device_now)(void); /* instead; NULL: it is the one above */
    int retained; /* how often a primary context was */
    int fail_load;         /* what loading code gives, a CUresult */
    bool loaded_older;     /* the code that was last loaded is that for older drivers */
    bool no_function_load; /* as drivers before CUDA 12.4 */
    /* optional: told of each kernel before it runs and after, with its arguments; and when the
     * threads of a block have come to a barrier or, last, to the end */
    void (*launching)(const char *kernel, const void *table, size_t bytes);
    void (*launched)(const char *kernel, const void *table, void *stream);
    void (*met)(unsigned threads, bool last);
    /* optional: after each launch; true: it may be made anew, by host_run(), and stays for ever */
    bool (*keep)(struct host_work *work, void *stream);
    unsigned order;  /* of blocks and threads: 0 forward, 1 reverse, 2 to 4 permuted */
    int fail_launch; /* the number of the launch that fails, from 1; 0: none */
    size_t launches;
    char found[512];  /* names of the kernels whose function was asked for */
    char loaded[512]; /* and of those that were loaded beforehand */
    size_t blocks;    /* of the last launch */
    size_t bytes;     /* of its arguments */
    void *stream;
    void *captured;                     /* the one stream on which a graph is being captured */
    unsigned graph;                     /* its number; 0: none */
    uint64_t (*graph_of)(void *stream); /* instead of these two; NULL: they are asked */
    bool implicit;                      /* asked about another stream, the driver says so */
    int mode;                           /* of capture, this driver's one thread's */
} host_driver;

enum { HOST_ORDERS = 5 };

#ifndef __cplusplus
extern _Thread_local bool host_context; /* whether one is current; at first none is */
#endif
extern host_driver host;

void host_run(const host_work *work, void *stream);

#endif
