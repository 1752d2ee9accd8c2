/* SPDX-License-Identifier: BSD-3-Clause */
/* mutant_inputs.h: what a kernel and its mutants run on. */
#ifndef OPTFUSE_TEST_PTX_MUTANT_INPUTS_H
#define OPTFUSE_TEST_PTX_MUTANT_INPUTS_H

#include "batch.h"

enum { TENSORS = 8, MOST_AREAS = TENSORS * N_ARRAYS };

/* Memory that a launch may change. */
typedef struct area {
    unsigned char *at, *before, *after;
    size_t bytes;
} area;

typedef struct input {
    batch b;
    of_cuda_packing packing;
    bool packs;
    int major, multiprocessors;
    unsigned order;
    size_t element;
    area areas[MOST_AREAS];
    size_t n_areas;
} input;

/* Drawn as device_check draws them, of few and mostly short tensors; of packing and scaling, too.
 * is_long: as many tensors as there may be, of up to 20,000 elements. */
void input_fill(input *in, const char *rule, of_dtype dtype, bool is_long, uint64_t random);
void input_drop(input *in);
/* Launches. False: the machine saw an error. */
bool input_run(input *in);

#endif
