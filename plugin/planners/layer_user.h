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

/* The tasks of one use, run in its forward pass for the sake of their time. */
typedef struct of_layer_rehearsal {
    double began, ended; /* the forward pass of this use, with its rehearsal: by CLOCK_MONOTONIC */
    double forward, input_gradient, weight_gradient; /* seconds */
} of_layer_rehearsal;

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
    /* Whether uses are to be rehearsed now, and what a rehearsal has found. */
    bool (*is_rehearsed)(void *ctx);
    void (*rehearsed)(void *ctx, size_t layer, const of_layer_rehearsal *found);
} of_layer_user;

#ifdef __cplusplus
}
#endif
#endif
