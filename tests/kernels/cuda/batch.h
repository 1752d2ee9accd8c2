/* SPDX-License-Identifier: BSD-3-Clause */
/* batch.h: many tensors to update at once, and what the plain C row makes of
 * each of them. */
#ifndef OPTFUSE_TEST_BATCH_H
#define OPTFUSE_TEST_BATCH_H

#include "../arrays.h"
#include "../random_program.h"
#include "cuda/cuda_kernels.h"

enum { MOST_TENSORS = 1300, MOST_LENGTH = 40000, LONG_TENSORS = 24, SHORT_LENGTH = 80 };

typedef struct batch_tensor {
    arrays mine, wanted;
    float step;
    float step_before; /* read by the kernel where steps are on the device */
    bool step_on_device;
    float numbers[OF_MAX_COUNTERS], wanted_numbers[OF_MAX_COUNTERS]; /* "on the device" */
} batch_tensor;

typedef struct batch {
    batch_tensor *tensors;
    of_gpu_entry *entries;
    size_t n, most, longest;
    const of_rule *rule;
    bool mixed; /* set before the batch is filled: its state is bfloat16, by of_rule_mixed() */
    of_gpu_update update;
    double hyper[OF_MAX_HYPER];
    double prepared[OF_MAX_HYPER]; /* scalars, if the rule has them prepared: for all tensors */
    of_instruction code[MOST_INSTRUCTIONS]; /* of a rule that runs programs */
    of_program program;
    float lr, grad_scale, found_inf; /* "device" scalars */
    float factor;                    /* for float64 it has to be a double: */
    double wide_factor;
    bool early;
} batch;

/* The powers that the kernels get: the C library's, or where translated PTX runs nvcc's own. */
extern float (*batch_powf)(float x, float exponent);
extern double (*batch_pow)(double x, double exponent);

/* A factor at which some products with numbers of 16 bits are next to the middle between two of
 * these, so that it shows how a product is rounded. For other dtypes one with many digits. */
float near_halves(of_dtype dtype, uint64_t *random);

/* Room for so many tensors; the first LONG_TENSORS have up to `longest` elements. */
void batch_create(batch *b, size_t most, size_t longest);
void batch_destroy(batch *b);

/* A random batch for a rule and dtype; `many`: more than a table holds. */
void batch_fill(batch *b, const of_rule *rule, of_dtype dtype, bool many, uint64_t *random);
/* Computes `wanted` of every tensor. */
void batch_expect(batch *b);
/* The number of elements that differ after the update, and of writes outside. */
size_t batch_differ(const batch *b, bool report);

#endif
