/* SPDX-License-Identifier: BSD-3-Clause */
/* gpu_update.h: updates of tensors on a GPU, as the core gives them to its host and the host to the
 * kernels (cuda/cuda_kernels.h).
 */
#ifndef OPTFUSE_GPU_UPDATE_H
#define OPTFUSE_GPU_UPDATE_H

#include "program.h"

/* One tensor: device pointers, dense, of the update's dtype. `grad` is written
 * only if there is a gradient scale. state[] in the rule's order; unused ones
 * are not read. */
typedef struct of_gpu_entry {
    void *param;
    void *grad;
    void *state[OF_MAX_STATE];
    size_t n;             /* elements; 0 is allowed */
    const float *step_at; /* on the device: number of the update before this one; or NULL: */
    double step;          /* that of this one, >= 1. (Prepared scalars have it in them.) */
    /* Device: numbers beside the step, of rules that have of_rule.counts_on_gpu. The update
     * reads the numbers, then writes those of the next update, which follow from *step_at. */
    float *numbers_at[OF_MAX_COUNTERS];
    uint32_t parameter; /* of_span.parameter; of rules that round, whose step_at is NULL */
} of_gpu_entry;

/* The common arguments of the tensors of one call. A device scalar, where given,
 * is read by the kernel when it runs. */
typedef struct of_gpu_update {
    const char *rule;
    of_dtype dtype;
    int device; /* ordinal, used if no context is current */
    /* In the rule's order; or what of_rule.prepare_gpu() made of them, for rules that have
     * it: then nothing else but the factor may be on the device. */
    const double *hyper;
    const float *lr_at;         /* device; instead of the lr in hyper, or NULL */
    const float *grad_scale_at; /* device; gradients are divided by it, or NULL */
    const float *found_inf_at;  /* device; 1 skips the update, or NULL */
    /* Device, of the type of the computation: float, or double for float64. Before anything
     * else gradients are multiplied by it, rounded to their dtype; or NULL. */
    const void *factor_at;
    void *stream; /* CUstream or cudaStream_t */
    uint32_t chunk; /* elements that a block updates, a multiple of 64; 0: by the launch's size */
    /* For rules that run programs: of_program_check() has passed it. It has at most 256
     * instructions, and together 12 temporaries and state tensors up to the last that it uses. */
    const of_program *program;
    bool wide_state; /* of_span.wide_state */
} of_gpu_update;

/* Integers of stochastic rounding to make on a GPU (rules/draws.h). */
typedef struct of_gpu_draws {
    uint32_t *to;      /* device */
    uint64_t n, first; /* as many, from this element on */
    uint64_t seed;
    uint32_t step, parameter; /* of_draw_key's */
    uint32_t halves;          /* 2 of bfloat16, 1 of float16 */
} of_gpu_draws;

#endif
