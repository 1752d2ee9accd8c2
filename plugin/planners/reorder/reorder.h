/* SPDX-License-Identifier: BSD-3-Clause */
/* reorder.h: plans of when the weight gradients of a backward pass run (out-of-order
 * backpropagation, arXiv 2110.00929), and what a plan costs in memory and time.
 *
 * A layer has two tasks in the backward pass: dX, the gradient of its input, which the layer
 * before it waits for, and dW, the gradients of its weight and bias, which only its update waits
 * for. So a dW may be *held*: it runs after the last dX of the pass, in its turn among the held
 * ones. That lets the parameters that the next forward pass needs first be reduced between
 * processes first. Meanwhile the layer's x and dY stay in memory.
 *
 * Places are an array of n numbers, one a layer in the order of the forward pass: either
 * OF_REORDER_AT_ONCE or the layer's turn. They are valid if the turns are 0 to m - 1, each once.
 *
 * The functions keep nothing, and any thread may call them. Their errors are those of
 * optfuse.h: on anything but OF_OK of_error_message() says what to do, and no output has been
 * written. */
#ifndef OPTFUSE_PLANNERS_REORDER_REORDER_H
#define OPTFUSE_PLANNERS_REORDER_REORDER_H

#include "optfuse.h"
#include "planners/network_link.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One layer's work in an iteration. An array of them is in the order of the forward pass. */
typedef struct of_layer_work {
    uint64_t input_bytes;  /* of x and of dX. dW needs x, dX does not */
    uint64_t output_bytes; /* of dY, which both need */
    uint64_t weight_bytes; /* of dW and db: what is reduced between processes */
    double forward, input_gradient, weight_gradient; /* seconds; 0: not known */
    double update;           /* seconds, after the reduction; 0 without weight_bytes */
    bool has_input_gradient; /* false: x needs no gradient, as of the first layer; no dX runs */
    bool frees_gradient;     /* its update follows at once and frees it (backward fusion), or it
                                is added to a gradient that is there; false: it stays */
} of_layer_work;

typedef enum of_reorder_schedule {
    OF_REORDER_STOCK,         /* holds none */
    OF_REORDER_LAST,          /* holds all, in stock's order: the last layer has the first turn */
    OF_REORDER_REVERSE_FIRST, /* holds the first k layers; layer 0 has the first turn, as the
                                 next forward pass needs them */
    OF_REORDER_BUDGET,        /* from the last layer on holds each whose x and dY still fit into
                                 the budget beside those of all held before it; stock's order */
    OF_REORDER_CHOSEN         /* holds those named, the first in the forward pass first */
} of_reorder_schedule;

typedef struct of_reorder_choice {
    of_reorder_schedule schedule;
    size_t k;              /* REVERSE_FIRST: at most n */
    uint64_t budget_bytes; /* BUDGET */
    const bool *held;      /* CHOSEN: n of them; borrowed for the call */
} of_reorder_choice;

/* Right after the layer's dX, as in stock. */
#define OF_REORDER_AT_ONCE UINT32_MAX

/* Writes the places of n layers, which are valid. Only BUDGET reads layers; they may be NULL for
 * the others. OF_INVALID: an unknown schedule, k > n, a pointer that is missing, or more layers
 * than there are turns. */
OF_API of_status of_reorder_places(const of_reorder_choice *choice, const of_layer_work *layers,
                                   size_t n, uint32_t *places);

/* Whether the turns are 0 to m - 1, each once; any n numbers may be asked about. Also false
 * for NULL with n > 0, and if there is no memory to find out. */
OF_API bool of_reorder_is_valid(const uint32_t *places, size_t n);
/* Writes which layers are held, the first turn first. order: room for n, undefined after a
 * failure; *n_held: how many. OF_INVALID: the places are not valid. */
OF_API of_status of_reorder_order(const uint32_t *places, size_t n, uint32_t *order,
                                  size_t *n_held);

/* Peak memory of a backward pass in bytes, by a model of a chain of layers. Alive are
 *   x of every layer whose dW has not run (one that two layers share counts with each),
 *   dY of the layer at work and of those whose dW is held,
 *   the dX that this layer makes, which then is the dY of the layer before it, or becomes it,
 *   the dW at work, and those made before but for layers that free theirs.
 * The peak is the most of this in any task. Parameters, optimizer state, workspaces of kernels
 * and what lies between layers (a loss, what others than these layers save) are not counted.
 * places may be NULL: stock's. OF_INVALID: the places are not valid, or the layers' bytes do not
 * fit 64 bits. OF_NO_MEMORY. */
OF_API of_status of_reorder_peak_bytes(const of_layer_work *layers, size_t n,
                                       const uint32_t *places, uint64_t *bytes);
/* How much higher that is than stock's, 0 if it is not; UINT64_MAX after a failure, with an error
 * message. */
OF_API uint64_t of_reorder_extra_bytes(const of_layer_work *layers, size_t n,
                                       const uint32_t *places);

/* How gradients are reduced between processes. Buckets are DistributedDataParallel's: filled with
 * whole layers in the order in which gradients are complete, and closed by the layer with which
 * they reach their cap, or by the end of the backward pass. */
typedef struct of_network {
    of_network_link link;
    uint64_t bucket_bytes;       /* 0: a message for each layer */
    uint64_t first_bucket_bytes; /* the cap of the first bucket */
} of_network;

/* Seconds of an iteration in steady state. */
typedef struct of_reorder_times {
    double iteration;
    double compute;       /* all tasks; what an iteration takes if nothing is waited for */
    double communication; /* all messages */
    double exposed;       /* what compute waits for messages: iteration minus compute */
} of_reorder_times;

/* Simulates data parallel training of processes that are equally fast. Compute does one task at
 * a time: dX and dW from the last layer to the first, the held dW in their turns, updates, then
 * the next forward pass. So does the network: a bucket is one message over the link, which starts
 * when the bucket is closed and the message before it is through. Compute takes up the buckets in
 * their order: it waits for the message, then runs the updates of the bucket. All of them before
 * the forward pass, as DistributedDataParallel waits in backward; with await_first_use each layer
 * of the forward pass takes up as many as it needs. A layer without weight_bytes is in no bucket
 * and waits for none. OF_INVALID: the places are not valid, a time is negative or not finite, or a
 * layer has an update and no weight_bytes. OF_NO_MEMORY. */
OF_API of_status of_reorder_simulate(const of_layer_work *layers, size_t n, const uint32_t *places,
                                     const of_network *network, bool await_first_use,
                                     of_reorder_times *out);

/* The k of REVERSE_FIRST with the shortest iteration among those whose extra bytes are allowed,
 * the smallest such k if several are equal (to 1e-9 of it), and its times. k = 0 adds no bytes, so
 * there always is one. Fails as of_reorder_simulate() and of_reorder_peak_bytes() do. */
OF_API of_status of_reorder_best_k(const of_layer_work *layers, size_t n, const of_network *network,
                                   bool await_first_use, uint64_t extra_bytes_allowed, size_t *k,
                                   of_reorder_times *out);

#ifdef __cplusplus
}
#endif

#endif
