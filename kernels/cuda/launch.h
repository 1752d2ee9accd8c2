/* SPDX-License-Identifier: BSD-3-Clause */
/* launch.h: between the files of this library. */
#ifndef OPTFUSE_CUDA_LAUNCH_H
#define OPTFUSE_CUDA_LAUNCH_H

#include "driver.h"
#include "table.h"

typedef struct of_cuda_state {
    unsigned used; /* bit i: the i-th tensor */
    size_t bytes;  /* of an element */
} of_cuda_state;

/* Checks the rule, says which state it uses, and begins an empty table. */
of_cuda_status of_cuda_rule(const of_gpu_update *update, of_cuda_state *state,
                            of_cuda_common *common, bool early);

/* Puts a program's instructions before the entries, and says how many rows of registers it uses.
 * NULL, or why they can't be run on a GPU. */
const char *of_cuda_put_code(of_cuda_large_table *table, of_dtype dtype,
                             const of_program *program, unsigned *rows);

/* The numbers that entries have on the device become those of the next update. */
of_cuda_status of_cuda_next_numbers(const of_driver *driver, const of_gpu_update *update,
                             const of_gpu_entry *entries, size_t n_entries);

#endif
