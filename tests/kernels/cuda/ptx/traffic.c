/* SPDX-License-Identifier: BSD-3-Clause */
/* traffic.c: launches each rule's usual update on translated PTX that counts (traffic.py), and
 * prints per element the bytes that it reads and writes, other accesses (of scalars), and the
 * instructions of its PTX. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../bench.h"
#include "batch.h"
#include "host_driver.h"
#include "machine.h"

enum { ELEMENTS = 16384 };

static void count(const of_rule *rule, of_dtype dtype, uint64_t *random) {
    batch b;
    batch_create(&b, 1, ELEMENTS);
    batch_fill(&b, rule, dtype, true, random);
    bench_usual_hyper(rule, b.hyper);
    of_count counted = {.step = 10, .counters = {1, 1}};
    if (rule->prepare_gpu)
        rule->prepare_gpu(b.hyper, &counted, b.prepared);
    b.update.lr_at = b.update.grad_scale_at = b.update.found_inf_at = NULL;
    b.update.factor_at = NULL;
    arrays *mine = &b.tensors[0].mine;
    arrays_place_aligned(mine, dtype, ELEMENTS, 15, 16, random);
    for (int i = 0; i < N_ARRAYS; i++) {
        mine->at[i] = mine->areas[i].pages; /* no array is an element off */
        memset(mine->at[i], 0x3c, ELEMENTS * of_dtype_size(dtype));
    }
    of_cuda_entry *entry = &b.entries[0];
    *entry = (of_cuda_entry){.param = mine->at[0],
                             .grad = mine->at[1],
                             .n = ELEMENTS,
                             .step_at = entry->step_at,
                             .step = 10,
                             .numbers_at = {entry->numbers_at[0], entry->numbers_at[1]}};
    for (int i = 0; i < OF_MAX_STATE; i++)
        entry->state[i] = mine->at[2 + i];
    memset(&ptx_now.counted, 0, sizeof ptx_now.counted);
    host.multiprocessors = 132;
    if (of_cuda_launch(&b.update, b.entries, 1) != OF_CUDA_OK)
        abort();
    const double each = 1.0 / ELEMENTS;
    printf("%s %s %g %g %g %g\n", rule->name, of_dtype_name(dtype),
           16 * each * (double)ptx_now.counted.vectors[0],
           16 * each * (double)ptx_now.counted.vectors[1], each * (double)ptx_now.counted.others,
           each * (double)ptx_now.counted.instructions);
    batch_destroy(&b);
}

int main(void) {
    uint64_t random = 1;
    for (const of_rule *rule = of_rules; rule->name; rule++)
        for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++)
            if ((rule->prepare_gpu || strcmp(rule->name, "adam") == 0 ||
                 strcmp(rule->name, "sgd") == 0) &&
                !rule->runs_programs)
                count(rule, (of_dtype)dtype, &random);
    return EXIT_SUCCESS;
}
