/* SPDX-License-Identifier: BSD-3-Clause */
#include "launch_ranges.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "packing.h"

static void add(launch_ranges *r, uint64_t address, size_t bytes, bool write) {
    if (address)
        r->at[r->n++] = (launch_range){(const void *)(uintptr_t)address, bytes, write};
}

static void add_common(launch_ranges *r, const of_cuda_common *common, size_t element) {
    add(r, (uintptr_t)common->factor_at, element > sizeof(float) ? element : sizeof(float), false);
    add(r, (uintptr_t)common->lr_at, sizeof(float), false);
    add(r, (uintptr_t)common->grad_scale_at, sizeof(float), false);
    add(r, (uintptr_t)common->found_inf_at, sizeof(float), false);
}

/* Adds the memory that a program reads and writes; the words are in the order of its registers. */
static void add_memory(launch_ranges *r, const of_cuda_common *common, const uint64_t *word,
                       size_t bytes) {
    for (unsigned i = 0; i < OF_REGISTER_TEMPORARY; i++)
        if ((common->reads | common->writes) >> i & 1u)
            add(r, word[i], bytes, common->writes >> i & 1u);
}

/* An entry as table.h says. */
static void add_entry(launch_ranges *r, const of_cuda_common *common, const uint64_t *word,
                      unsigned states, size_t element, size_t state) {
    const uint64_t *number = word + 2 + states, *step = number + common->numbers;
    const size_t bytes = (size_t)step[1] * element;
    if (common->runs_programs) {
        add_memory(r, common, word, bytes);
        return;
    }
    add(r, word[0], bytes, true);
    add(r, word[1], bytes, common->grad_scale_at != NULL);
    for (unsigned i = 0; i < states; i++)
        add(r, word[2 + i], bytes / element * state, true);
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

/* Bytes of an element of the state. */
static size_t state_of(const char *kernel, const of_cuda_common *common) {
    const size_t narrow = strstr(kernel, "_mixed_") ? sizeof(uint16_t) : element_of(kernel);
    return common->wide_state ? sizeof(float) : narrow;
}

/* The name is of_cuda_RULE_DTYPE_USED_SIZE. */
static unsigned states_of(const char *kernel) {
    const char *at = strrchr(kernel, '_');
    while (at[-1] != '_')
        at--;
    return (unsigned)__builtin_popcount((unsigned)strtoul(at, NULL, 10));
}

static void read_update(launch_ranges *r, const char *kernel, const void *table) {
    /* A small table begins as a large one, and its words are fewer. */
    const of_cuda_common *common = (const of_cuda_common *)table;
    const uint64_t *word = (const uint64_t *)(common + 1);
    const unsigned states = states_of(kernel);
    add_common(r, common, element_of(kernel));
    if (common->runs_programs)
        word += common->code * of_cuda_instruction_words(
                                   element_of(kernel) == sizeof(double) ? OF_FLOAT64 : OF_FLOAT32);
    for (uint32_t i = 0; i < common->entries; i++)
        add_entry(r, common, word + i * (OF_CUDA_WORDS_BESIDE_STATE + states + common->numbers),
                  states, element_of(kernel), state_of(kernel, common));
}

static void read_steps(launch_ranges *r, const of_cuda_steps *steps) {
    add(r, (uintptr_t)steps->less_at, sizeof(float), false);
    for (uint64_t i = 0; i < steps->n; i++)
        add(r, (uintptr_t)steps->step[i], sizeof(float), true);
}

static void read_numbers(launch_ranges *r, const of_cuda_numbers *numbers) {
    for (uint64_t i = 0; i < numbers->n; i++) {
        add(r, (uintptr_t)numbers->at[i].step, sizeof(float), false);
        add(r, (uintptr_t)numbers->at[i].eta, sizeof(float), true);
        add(r, (uintptr_t)numbers->at[i].mu, sizeof(float), true);
    }
}

/* Rows that a row of a matrix is apart hold other memory between them, of the same tensor. */
static void read_packing(launch_ranges *r, const char *kernel, const of_cuda_packing_table *table) {
    const size_t size = element_of(kernel), n = (size_t)table->n;
    const size_t packed = size * of_packed_elements(n);
    const size_t matrix = size * ((n - 1) * (size_t)table->ld + n);
    const bool adds = strstr(kernel, "_add_") != NULL, merges = strstr(kernel, "_merge_") != NULL;
    add(r, (uintptr_t)table->to, merges ? size * n : adds ? packed : matrix, true);
    add(r, (uintptr_t)table->from, merges ? size * n : adds ? matrix : packed, false);
}

static void read_draws(launch_ranges *r, const of_gpu_draws *draws) {
    add(r, (uintptr_t)draws->to, (size_t)draws->n * sizeof *draws->to, true);
}

bool launch_ranges_read(launch_ranges *r, const char *kernel, const void *table) {
    r->n = 0;
    if (strcmp(kernel, "of_cuda_advance_steps") == 0)
        read_steps(r, (const of_cuda_steps *)table);
    else if (strcmp(kernel, "of_cuda_asgd_next") == 0)
        read_numbers(r, (const of_cuda_numbers *)table);
    else if (strcmp(kernel, "of_cuda_draw_integers") == 0)
        read_draws(r, (const of_gpu_draws *)table);
    else if (strstr(kernel, "of_cuda_packing_") == kernel)
        read_packing(r, kernel, (const of_cuda_packing_table *)table);
    else if (element_of(kernel))
        read_update(r, kernel, table);
    else
        return false;
    return true;
}
