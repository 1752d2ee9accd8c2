/* SPDX-License-Identifier: BSD-3-Clause */
/* pipeline.h: plans of layer pipelines (LayerPipe, arXiv 2108.06629; PipeDream, arXiv 1806.03377;
 * GPipe, arXiv 1811.06965; out-of-order backprop, arXiv 2110.00929): which process runs which task
 * of which layer, in which order, and how late gradients then are.
 *
 * A layer has up to four tasks a batch: the forward pass F, the gradient dX of its input, the
 * gradient dW of its weights, and their update U. dX may be split by input channels into two
 * parts, on two processes. A layer without weights has neither dW nor U. A layer has dX if a layer
 * below it has weights.
 *
 *   F(l, b)   needs F(l - 1, b)
 *   dX(l, b)  needs F(l, b) and the weights that F used, and all parts of dX(l + 1, b)
 *   dW(l, b)  needs F(l, b) and its input, and all parts of dX(l + 1, b)
 *   U(l, b)   needs dW(l, .) of all batches of its group
 *
 * The last layer's dX and dW need the gradient of its output, which comes with F. What crosses
 * processes is a message, which takes the link's latency and seconds a byte.
 *
 * Batches that share an update are a group: of_pipeline_group() of them, in order. A group's U is
 * that of its last batch, and the last group may be smaller. Replicas have a U each, that of their
 * own batch; those for which the last group has none have a U all the same, that of the batch which
 * would have come. With delays D, F(l, b) sees the updates of exactly the groups
 * < b / group - D(l).
 *
 * The functions keep nothing, and any thread may call them. Their errors are those of
 * optfuse.h: on anything but OF_OK of_error_message() says what to do, and no output has been
 * written. */
#ifndef OPTFUSE_PLANNERS_PIPELINE_PIPELINE_H
#define OPTFUSE_PLANNERS_PIPELINE_PIPELINE_H

#include "optfuse.h"
#include "planners/network_link.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum of_strategy {
    OF_PIPELINE_GPIPE, /* whole layers; all F of a group, then their gradients, then U. D = 0 */
    OF_PIPELINE_1F1B,  /* whole layers; one F, one backward (PipeDream). D = stages after */
    OF_PIPELINE_REPLICATED, /* the same, and several processes may share a stage */
    OF_PIPELINE_INTRA,      /* dX and dW of a layer may be apart; in slots */
    OF_PIPELINE_LAYERPIPE,  /* the same, and dX may be split; in slots */
    /* Whole layers, and D = 0: the F of a group see the updates of the groups before. */
    OF_PIPELINE_1F1B_FLUSH,   /* one F, one backward, then U */
    OF_PIPELINE_FAST_FORWARD, /* what is ready: dX, else F, else dW; U after its group's last dW */
    OF_PIPELINE_MODULO,       /* the same, and layers are dealt to the processes in turns */
    OF_PIPELINE_STRATEGIES
} of_strategy;

typedef enum of_task_kind {
    OF_TASK_FORWARD,
    OF_TASK_INPUT_GRADIENT,        /* dX, or its first part */
    OF_TASK_SECOND_INPUT_GRADIENT, /* the second part */
    OF_TASK_WEIGHT_GRADIENT,
    OF_TASK_UPDATE,
    OF_TASK_KINDS
} of_task_kind;

/* A layer's costs for one batch. An array of layers is in the order of the forward pass. */
typedef struct of_pipeline_layer {
    double forward, input_gradient, weight_gradient, update; /* seconds */
    uint64_t in_bytes, out_bytes;                            /* of x and dX; of y and dY */
    uint64_t weight_bytes; /* of what is trained; 0: no dW and no U */
    uint32_t channels;     /* of the input: what a split of dX divides */
    bool movable;          /* dX and dW may run elsewhere than F; needs weight_bytes and channels */
} of_pipeline_layer;

#define OF_NO_PROCESS (-1)
#define OF_SPLIT_MULTIPLE 16

/* The processes of a layer's tasks. U runs where F does: there the weights are. */
typedef struct of_pipeline_place {
    int32_t forward;
    int32_t weight_gradient;       /* as forward where there is no dW */
    int32_t input_gradient;        /* as forward where there is no dX */
    int32_t second_input_gradient; /* OF_NO_PROCESS: dX is whole */
    uint32_t
        split; /* input channels of the first part, a multiple of OF_SPLIT_MULTIPLE; 0: whole */
    int32_t replicas; /* the layer is on forward .. forward + replicas - 1, batch b on
                         forward + b % replicas; 1 but for REPLICATED */
} of_pipeline_place;

/* Borrowed for a call. */
typedef struct of_pipeline {
    of_strategy strategy;
    size_t processes;
    size_t micro_batches; /* batches a group of those with D = 0; 1 for the others */
    size_t in_flight;     /* FAST_FORWARD, MODULO: the most batches that a process has begun and
                             not ended; 0: any number, and for the others */
    size_t chunk;         /* MODULO: layers a turn; 0 for the others */
    const of_pipeline_layer *layers;
    const of_pipeline_place *places;
    size_t n; /* of layers and of places */
} of_pipeline;

/* A task of one batch. A schedule is an array of them; those of a process run in the array's
 * order. */
typedef struct of_pipeline_task {
    int32_t kind; /* of_task_kind */
    int32_t layer;
    int32_t batch; /* of a U of replicas it may be past the last one */
    int32_t process;
    double start, end; /* seconds, by of_pipeline_simulate() */
} of_pipeline_task;

/* Writes the n places by p->strategy; p->places is not read. largest: the seconds a batch of the
 * process that has most to do, or NULL; messages are not part of it, but for those of
 * REPLICATED's updates.
 *
 * Whole layers: the stages whose largest load is the least possible, but MODULO deals chunks of
 * layers to the processes in turns. REPLICATED: likewise exact, among all stages with r processes
 * each, whose load is (the layers' seconds + the all-reduces of their weights) / r; an all-reduce of
 * m bytes is a ring, 2 (r - 1) messages of m / r bytes. INTRA, LAYERPIPE: fills process after
 * process up to a limit, which is raised from the mean load in steps until all fits; stages, if that
 * is not better. LAYERPIPE's plan is never worse than INTRA's. What a split puts on a process is
 * rounded down to OF_SPLIT_MULTIPLE channels.
 * OF_INVALID: what of_pipeline_check() says of the layers. OF_NO_MEMORY. */
OF_API of_status of_pipeline_place_layers(const of_pipeline *p, const of_network_link *link,
                                          of_pipeline_place *places, double *largest);

/* OF_INVALID, with the layer and the reason: layers or places that can't be, as a part of a layer
 * that is not movable elsewhere, or a stage of whole layers that is not contiguous. */
OF_API of_status of_pipeline_check(const of_pipeline *p);

/* How many batches share an update of this layer: micro_batches * replicas. */
OF_API size_t of_pipeline_group(const of_pipeline *p, size_t layer);

/* D of each layer, in groups. Stages: of a stage with r processes, of which t >= r are from this
 * stage on, ceil(t / r) - 1. Slots: a batch moves on by one slot when it crosses processes; D is
 * the slot of U less that of F. OF_INVALID: see of_pipeline_check(). OF_NO_MEMORY. */
OF_API of_status of_pipeline_delays(const of_pipeline *p, uint32_t *delays);

/* How many tasks so many batches have. p has been checked. */
OF_API size_t of_pipeline_count(const of_pipeline *p, size_t batches);

/* The schedule of so many batches, with start = end = 0. tasks: room for of_pipeline_count(). link:
 * by its messages FAST_FORWARD and MODULO know what is ready. The dW of a layer run in the order of
 * their batches.
 * OF_INVALID: see of_pipeline_check(); no batch or more than an int32_t counts. OF_NO_MEMORY. */
OF_API of_status of_pipeline_schedule(const of_pipeline *p, const of_network_link *link,
                                      size_t batches, of_pipeline_task *tasks);

typedef struct of_pipeline_report {
    double makespan;   /* seconds from the first start to the last end */
    double period;     /* seconds a batch, of the process or layer that is slowest, away from both
                          ends of the run; 0: too few batches for that */
    double busy;       /* share of the makespan, mean over processes */
    double messages;   /* a batch */
    double bytes;      /* a batch */
    size_t in_flight;  /* the most batches that a process had begun and not ended */
    double held_bytes; /* the most that a process held for gradients to come: inputs of its layers
                          and gradients of their outputs */
} of_pipeline_report;

/* Writes start and end of every task: each begins when its process is free and what it needs is
 * there. Messages don't wait for each other and cost no process anything, but for the all-reduce of
 * replicas, with which they are busy before the update. What several tasks of one process need of
 * another is sent once.
 * OF_INVALID: see of_pipeline_check(); a task that is unknown, doubled, on another process than
 * its place, or one that can never start. OF_NO_MEMORY. */
OF_API of_status of_pipeline_simulate(const of_pipeline *p, const of_network_link *link,
                                      size_t batches, of_pipeline_task *tasks, size_t n_tasks,
                                      of_pipeline_report *report);

#ifdef __cplusplus
}
#endif

#endif
