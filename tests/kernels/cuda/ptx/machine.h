/* SPDX-License-Identifier: BSD-3-Clause */
/* machine.h: where translated PTX runs. The driver of the tests (host_driver.c) calls a kernel
 * for each thread of each block; the machine checks what the threads do. */
#ifndef OPTFUSE_TEST_MACHINE_H
#define OPTFUSE_TEST_MACHINE_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "host_device.h"
#include "launch_ranges.h"

enum { PTX_THREADS = 256, PTX_BEGINS = 0, PTX_ENDED = -1 };

/* The launch of this host thread. */
typedef struct ptx_launch {
    const char *kernel;
    const unsigned char *arguments;
    size_t bytes;                 /* of them */
    launch_ranges ranges;         /* that it may access, in the order of their addresses */
    const launch_range *last[64]; /* the ranges that some instructions found */
    int place[PTX_THREADS];       /* PTX_BEGINS, the barrier that a thread waits at, or PTX_ENDED */
    int64_t turns;                /* of loops that a thread may still take */
    int nudge; /* approximations give a number that is so many units from their value */
    jmp_buf *caught; /* optional: where to go on after an error; else the process ends */
} ptx_launch;

extern _Thread_local ptx_launch ptx_now;

/* For the driver: host_driver.h says when. All threads of a block have to be at the same barrier,
 * and at the end none. */
void ptx_launching(const char *kernel, const void *table, size_t bytes);
void ptx_met(unsigned threads, bool last);

/* Before a kernel is called beside the driver, by thread 0 of block 0: it may write to `out`. */
void ptx_alone(const char *kernel, const void *arguments, size_t bytes, void *out,
               size_t out_bytes);

_Noreturn void ptx_fail(int line, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Checked addresses. */
unsigned char *ptx_global(uint64_t address, size_t bytes, bool write, int line);
const unsigned char *ptx_argument(uint64_t address, size_t bytes, int line);
unsigned char *ptx_shared(unsigned char *shared, size_t size, uint32_t at, size_t bytes, int line);

/* At the start of a thread, and of its way from a barrier on. */
static inline int ptx_place(void) {
    return ptx_now.place[host_thread_index.x];
}
static inline void ptx_stop(int place) {
    ptx_now.place[host_thread_index.x] = place;
}
static inline void ptx_turn(int line) {
    if (--ptx_now.turns < 0)
        ptx_fail(line, "a loop without an end");
}

#endif
