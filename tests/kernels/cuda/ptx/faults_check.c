/* SPDX-License-Identifier: BSD-3-Clause */
/* faults_check.c: the machine lets the kernels of faults.ptx do what they may, and sees what they
 * must not. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"

_Thread_local host_index host_block_index, host_block_size, host_thread_index;
_Thread_local unsigned host_phase;
_Thread_local unsigned char *host_shared;
_Thread_local size_t host_shared_bytes;

typedef void kernel(const void *arguments);
kernel load_if, copy_four, halves, read_argument, circle, swap, swap_rows;

static int failures;

static void check(bool right, const char *promise) {
    if (!right) {
        printf("FAIL %s\n", promise);
        failures++;
    }
}

/* The kernel may write to eight words; whether it ran without an error. */
static uint32_t words[8] __attribute__((aligned(16)));

static bool runs(kernel *run, const void *arguments, size_t bytes) {
    jmp_buf caught;
    ptx_now.caught = &caught;
    const bool failed = setjmp(caught) != 0;
    if (!failed) {
        ptx_alone("a kernel", arguments, bytes, words, sizeof words);
        run(arguments);
    }
    ptx_now.caught = NULL;
    return !failed;
}

static bool runs_on(kernel *run, const void *from) {
    const void *const arguments[] = {words, from};
    return runs(run, arguments, sizeof arguments);
}

static void check_predicates(void) {
    struct {
        uint32_t *out;
        const void *from;
        uint64_t load;
    } arguments = {words, NULL, 0};
    words[1] = 99;
    check(runs(load_if, &arguments, sizeof arguments) && words[0] == 7 && words[1] == 0,
          "a load whose predicate is false does nothing, a store whose predicate is not does");
    arguments.load = 1;
    check(!runs(load_if, &arguments, sizeof arguments), "it would have read nowhere");
    words[1] = 5;
    arguments.from = words + 1;
    check(runs(load_if, &arguments, sizeof arguments) && words[0] == 5 && words[1] == 5,
          "and reads where its predicate is true");
}

static void check_addresses(void) {
    for (uint32_t i = 0; i < 8; i++)
        words[i] = i;
    check(runs_on(copy_four, words + 4) && words[0] == 7 && words[3] == 4, "four words at once");
    check(!runs_on(copy_four, words + 1), "four words at an address of one: misaligned");
    check(!runs_on(copy_four, words + 8), "behind the end of the memory");
    check(!runs_on(copy_four, words - 4), "before its beginning");
    static const uint32_t others[4] __attribute__((aligned(16)));
    check(!runs_on(copy_four, others), "memory that is not the launch's");
    words[4] = 0x22221111;
    words[5] = 0x33333333;
    check(runs_on(halves, words + 4) && words[0] == 0x33333333 && words[1] == 0x11112222,
          "registers are taken apart and put together");
    check(runs_on(read_argument, (void *)8) && words[0] == 8, "an argument by its address");
    check(!runs_on(read_argument, (void *)16), "behind the arguments");
    check(!runs_on(read_argument, (void *)4), "half an argument");
    const void *const argument[] = {words};
    check(!runs(circle, argument, sizeof argument), "a loop without an end");
}

static void each_thread(kernel *run, const void *arguments, unsigned threads) {
    for (unsigned i = 0; i < threads; i++) {
        host_thread_index.x = i;
        run(arguments);
    }
}

/* So many of `threads` go up to the barrier. */
static bool swaps_by(kernel *run, unsigned threads, uint64_t some) {
    const struct {
        uint32_t *out;
        uint64_t some;
    } arguments = {words, some};
    jmp_buf caught;
    ptx_now.caught = &caught;
    const bool failed = setjmp(caught) != 0;
    if (!failed) {
        ptx_alone("swap", &arguments, sizeof arguments, words, sizeof words);
        each_thread(run, &arguments, threads);
        ptx_met(threads, false);
        each_thread(run, &arguments, threads);
        ptx_met(threads, true);
    }
    ptx_now.caught = NULL;
    return !failed;
}

static bool swaps(unsigned threads, uint64_t some) {
    return swaps_by(swap, threads, some);
}

static bool are_swapped(void) {
    return words[0] == 1 && words[1] == 0 && words[2] == 3 && words[3] == 2;
}

static void check_barriers(void) {
    check(swaps(4, 4) && are_swapped(), "behind a barrier is what all threads did before it");
    check(!swaps(4, 3), "a barrier that not all threads reach");
    check(swaps(4, 0), "a block that ends before it");
    check(!swaps(5, 5), "behind the end of the shared memory");
}

static void check_shared_by_launch(void) {
    static unsigned char memory[32] __attribute__((aligned(16)));
    host_shared = memory;
    host_shared_bytes = 16;
    memset(words, 0, sizeof words);
    check(swaps_by(swap_rows, 4, 4) && are_swapped() && memory[12] == 3,
          "shared memory that the launch gives");
    check(!swaps_by(swap_rows, 5, 5), "more than the launch gives");
    host_shared_bytes = 0;
    check(!swaps_by(swap_rows, 1, 1), "a launch that gives none");
}

int main(void) {
    check_predicates();
    check_addresses();
    check_barriers();
    check_shared_by_launch();
    printf(failures ? "%d failures\n" : "all faults are seen\n", failures);
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
