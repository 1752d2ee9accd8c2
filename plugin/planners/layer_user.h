/* SPDX-License-Identifier: BSD-3-Clause */
/* layer_user.h: layers whose backward pass is two tasks, and who is interested in them.
 *
 *   dX  the gradient of the input. The rest of backward waits for it.
 *   dW  the gradients of weight and bias. Only the update waits for it, so it may run later.
 *
 * The host (shim/layers) finds the uses of a layer's weight in the forward pass and calls a
 * user of the layer, which says when dW runs. Any thread may call; none holds a lock of the
 * core. Out-of-order backprop: Oh et al., EuroSys'22 (arXiv 2110.00929). */
#ifndef OPTFUSE_PLANNERS_LAYER_USER_H
#define OPTFUSE_PLANNERS_LAYER_USER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One use of a layer in a forward pass: y = f(x), with gradients dX and dY of the same sizes. */
typedef struct of_layer_use {
    uint64_t input_bytes;  /* x */
    uint64_t output_bytes; /* y */
    uint64_t weight_bytes; /* weight and bias */
    bool has_input_gradient;
    bool frees_gradient; /* an update in backward does, or it is added to one that is there */
    bool recomputed;     /* inside backward, as checkpointing does */
} of_layer_use;

typedef enum of_layer_task {
    OF_LAYER_FORWARD,
    OF_LAYER_INPUT_GRADIENT,
    OF_LAYER_WEIGHT_GRADIENT
} of_layer_task;

/* Tasks that run at once have higher priorities than these. */
enum { OF_PRIORITIES = 1 << 20 };

/* Who decides about the tasks of layers 0, 1, ... A dW that waits keeps `bytes` of x and dY. */
typedef struct of_layer_user {
    uint32_t struct_size; /* sizeof(of_layer_user) */
    void *ctx;            /* counted: retain() for each host object that keeps it */
    void (*retain)(void *ctx);
    void (*release)(void *ctx);
    /* The layer is used. false: leave this use alone. Else forget() is called once. */
    bool (*use)(void *ctx, size_t layer, const of_layer_use *use);
    void (*forget)(void *ctx, size_t layer);
    /* dX of a use has run. The priority of its dW among those that wait, from
     * OF_PRIORITIES - 1 down to 1; 0: at once. Else done() is called once. */
    uint64_t (*wait)(void *ctx, size_t layer, uint64_t bytes);
    /* That dW has run, or never will. */
    void (*done)(void *ctx, size_t layer);
    /* Whether took() is wanted now; and, of each task on the CPU, when it ran. The clock is
     * CLOCK_MONOTONIC, in seconds. */
    bool (*is_timed)(void *ctx);
    void (*took)(void *ctx, size_t layer, of_layer_task task, double began, double ended);
} of_layer_user;

#ifdef __cplusplus
}
#endif
#endif
