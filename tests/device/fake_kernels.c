/* SPDX-License-Identifier: BSD-3-Clause */
/* fake_kernels.c: reads the tables that kernels are launched with, and tells
 * what each one has read and written. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/host_driver.h"
#include "cuda/table.h"
#include "packing.h"
#include "watch.h"

#define VISIBLE __attribute__((visibility("default")))

static fake_launched *watcher;

/* The ranges of one launch, with room for the fullest table. */
typedef struct ranges {
    size_t n;
    fake_range at[OF_CUDA_WORDS(OF_CUDA_LARGE_BYTES) + 8];
} ranges;

static void add(ranges *r, uint64_t address, size_t bytes, bool write) {
    if (address)
        r->at[r->n++] = (fake_range){(const void *)(uintptr_t)address, bytes, write};
}

static void add_common(ranges *r, const of_cuda_common *common, size_t element) {
    add(r, (uintptr_t)common->factor_at, element > sizeof(float) ? element : sizeof(float), false);
    add(r, (uintptr_t)common->lr_at, sizeof(float), false);
    add(r, (uintptr_t)common->grad_scale_at, sizeof(float), false);
    add(r, (uintptr_t)common->found_inf_at, sizeof(float), false);
}

/* What a program reads and writes; the words are in the order of its registers. */
static void add_memory(ranges *r, const of_cuda_common *common, const uint64_t *word,
                       size_t bytes) {
    for (unsigned i = 0; i < OF_REGISTER_TEMPORARY; i++)
        if ((common->reads | common->writes) >> i & 1u)
            add(r, word[i], bytes, common->writes >> i & 1u);
}

/* An entry as table.h says. */
static void add_entry(ranges *r, const of_cuda_common *common, const uint64_t *word,
                      unsigned states, size_t element) {
    const uint64_t *number = word + 2 + states, *step = number + common->numbers;
    const size_t bytes = (size_t)step[1] * element;
    if (common->runs_programs) {
        add_memory(r, common, word, bytes);
        return;
    }
    add(r, word[0], bytes, true);
    add(r, word[1], bytes, common->grad_scale_at != NULL);
    for (unsigned i = 0; i < states; i++)
        add(r, word[2 + i], bytes, true);
    for (unsigned i = 0; i < common->numbers; i++)
        add(r, number[i], sizeof(float), false);
    if (common->steps_on_device)
        add(r, step[0], sizeof(float), false);
}

static size_t element_of(const char *kernel) {
    for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++)
        if (strstr(kernel, of_dtype_name((of_dtype)dtype)))
            return of_dtype_size((of_dtype)dtype);
    return 0;
}

/* The name is of_cuda_RULE_DTYPE_USED_SIZE. */
static unsigned states_of(const char *kernel) {
    const char *at = strrchr(kernel, '_');
    while (at[-1] != '_')
        at--;
    return (unsigned)__builtin_popcount((unsigned)strtoul(at, NULL, 10));
}

static void read_update(ranges *r, const char *kernel, const void *table) {
    /* A small table begins as a large one, and its words are fewer. */
    const of_cuda_common *common = (const of_cuda_common *)table;
    const uint64_t *word = (const uint64_t *)(common + 1);
    const unsigned states = states_of(kernel);
    add_common(r, common, element_of(kernel));
    if (common->runs_programs)
        word += common->code * of_cuda_instruction_words(element_of(kernel) == sizeof(double)
                                                             ? OF_FLOAT64
                                                             : OF_FLOAT32);
    for (uint32_t i = 0; i < common->entries; i++)
        add_entry(r, common, word + i * (OF_CUDA_WORDS_BESIDE_STATE + states + common->numbers),
                  states, element_of(kernel));
}

static void read_steps(ranges *r, const of_cuda_steps *steps) {
    add(r, (uintptr_t)steps->found_inf_at, sizeof(float), false);
    for (uint64_t i = 0; i < steps->n; i++)
        add(r, (uintptr_t)steps->step[i], sizeof(float), true);
}

static void read_numbers(ranges *r, const of_cuda_numbers *numbers) {
    for (uint64_t i = 0; i < numbers->n; i++) {
        add(r, (uintptr_t)numbers->at[i].step, sizeof(float), false);
        add(r, (uintptr_t)numbers->at[i].eta, sizeof(float), true);
        add(r, (uintptr_t)numbers->at[i].mu, sizeof(float), true);
    }
}

/* Rows that a row of a matrix is apart hold other memory between them, of the same tensor. */
static void read_packing(ranges *r, const char *kernel, const of_cuda_packing_table *table) {
    const size_t size = element_of(kernel), n = (size_t)table->n;
    const size_t packed = size * of_packed_elements(n);
    const size_t matrix = size * ((n - 1) * (size_t)table->ld + n);
    const bool adds = strstr(kernel, "_add_") != NULL, merges = strstr(kernel, "_merge_") != NULL;
    add(r, (uintptr_t)table->to, merges ? size * n : adds ? packed : matrix, true);
    add(r, (uintptr_t)table->from, merges ? size * n : adds ? matrix : packed, false);
}

static void tell(const char *kernel, const void *table, void *stream) {
    ranges *r = watcher ? calloc(1, sizeof *r) : NULL;
    if (!r)
        return;
    if (strcmp(kernel, "of_cuda_advance_steps") == 0)
        read_steps(r, (const of_cuda_steps *)table);
    else if (strcmp(kernel, "of_cuda_asgd_next") == 0)
        read_numbers(r, (const of_cuda_numbers *)table);
    else if (strstr(kernel, "of_cuda_packing_") == kernel)
        read_packing(r, kernel, (const of_cuda_packing_table *)table);
    else if (element_of(kernel))
        read_update(r, kernel, table);
    else {
        fprintf(stderr, "fake_kernels.c does not know the kernel %s\n", kernel);
        abort();
    }
    watcher(stream, kernel, r->at, r->n);
    free(r);
}

VISIBLE void fake_optfuse_watch(fake_launched *launched, fake_graph_of *graph_of,
                                fake_device_now *device_now) {
    watcher = launched;
    host.launched = tell;
    host.graph_of = graph_of;
    host.device_now = device_now;
}
