/* SPDX-License-Identifier: BSD-3-Clause */
#include "machine.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_TURNS = 1 << 18 };

_Thread_local ptx_launch ptx_now;

void ptx_fail(int line, const char *format, ...) {
    va_list values;
    if (ptx_now.caught)
        longjmp(*ptx_now.caught, 1);
    printf("FAIL %s, line %d of its PTX, block %u, thread %u: ", ptx_now.kernel, line,
           host_block_index.x, host_thread_index.x);
    va_start(values, format);
    vprintf(format, values);
    va_end(values);
    printf("\n");
    fflush(stdout);
    abort();
}

static int by_address(const void *a, const void *b) {
    const uintptr_t x = (uintptr_t)((const launch_range *)a)->address;
    const uintptr_t y = (uintptr_t)((const launch_range *)b)->address;
    return (x > y) - (x < y);
}

static void begin(const char *kernel, const void *arguments, size_t bytes) {
    ptx_now.kernel = kernel;
    ptx_now.arguments = arguments;
    ptx_now.bytes = bytes;
    ptx_now.turns = MOST_TURNS;
    memset(ptx_now.last, 0, sizeof ptx_now.last);
    memset(ptx_now.place, 0, sizeof ptx_now.place);
}

void ptx_alone(const char *kernel, const void *arguments, size_t bytes, void *out,
               size_t out_bytes) {
    begin(kernel, arguments, bytes);
    ptx_now.ranges.n = 1;
    ptx_now.ranges.at[0] = (launch_range){out, out_bytes, true};
    host_block_index.x = host_thread_index.x = 0;
    host_block_size.x = 1;
}

void ptx_launching(const char *kernel, const void *table, size_t bytes) {
    begin(kernel, table, bytes);
    if (!launch_ranges_read(&ptx_now.ranges, kernel, table))
        ptx_fail(0, "launch_ranges.c does not know this kernel");
    qsort(ptx_now.ranges.at, ptx_now.ranges.n, sizeof(launch_range), by_address);
}

void ptx_met(unsigned threads, bool last) {
    for (unsigned i = 0; i < threads; i++)
        if (ptx_now.place[i] != ptx_now.place[0] || (last && ptx_now.place[i] > 0))
            ptx_fail(0, "thread %u is at %d, the first at %d: not all reach the barrier", i,
                     ptx_now.place[i], ptx_now.place[0]);
    ptx_now.turns = MOST_TURNS;
    if (last)
        memset(ptx_now.place, 0, sizeof ptx_now.place);
}

static bool holds(const launch_range *range, uint64_t address, size_t bytes, bool write) {
    const uint64_t begin = (uintptr_t)range->address;
    return address >= begin && address + bytes <= begin + range->bytes && (range->write || !write);
}

/* From the last range that does not begin behind the address back to the first that holds it:
 * ranges may overlap. */
static const launch_range *find(uint64_t address, size_t bytes, bool write) {
    size_t low = 0, high = ptx_now.ranges.n;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if ((uintptr_t)ptx_now.ranges.at[middle].address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    while (low-- > 0)
        if (holds(&ptx_now.ranges.at[low], address, bytes, write))
            return &ptx_now.ranges.at[low];
    return NULL;
}

static void align(uint64_t address, size_t bytes, int line) {
    if (address % bytes)
        ptx_fail(line, "%zu bytes at %#llx: misaligned", bytes, (unsigned long long)address);
}

unsigned char *ptx_global(uint64_t address, size_t bytes, bool write, int line) {
    const launch_range **last = &ptx_now.last[line % 64];
    align(address, bytes, line);
    if (!*last || !holds(*last, address, bytes, write))
        *last = find(address, bytes, write);
    if (!*last)
        ptx_fail(line, "%s %zu bytes at %#llx: not the launch's", write ? "writes" : "reads", bytes,
                 (unsigned long long)address);
    return (unsigned char *)(uintptr_t)address;
}

const unsigned char *ptx_argument(uint64_t address, size_t bytes, int line) {
    const uint64_t at = address - (uintptr_t)ptx_now.arguments;
    align(address, bytes, line);
    if (at > ptx_now.bytes || bytes > ptx_now.bytes - at)
        ptx_fail(line, "%zu bytes at %lld: outside of the arguments", bytes, (long long)at);
    return (const unsigned char *)(uintptr_t)address;
}

unsigned char *ptx_shared(unsigned char *shared, size_t size, uint32_t at, size_t bytes, int line) {
    align(at, bytes, line);
    if (at > size || bytes > size - at)
        ptx_fail(line, "%zu bytes at %u: outside of the shared memory", bytes, at);
    return shared + at;
}
