/* SPDX-License-Identifier: BSD-3-Clause */
/* fake_host.h: a complete host without PyTorch. Tensors are buffers with a
 * count of their users, so that memory released too early or kept too long is
 * seen; a marked buffer stands for a tensor with the first-use key, and
 * fake_use() for an operator that receives it. */
#ifndef FAKE_HOST_H
#define FAKE_HOST_H

#include <pthread.h>
#include <stdatomic.h>

#include "optfuse.h"

enum { FAKE_MAX_TENSORS = 256 };

typedef struct fake_buffer {
    atomic_int refs;
    atomic_bool marked;    /* by defer(): whoever uses it calls of_access() first */
    atomic_bool on_device; /* then the mark stays until a use finds nothing in flight */
    size_t bytes;
    _Alignas(64) unsigned char data[];
} fake_buffer;

typedef struct fake_host fake_host;

typedef struct fake_tensor {
    fake_host *host;
    int id; /* in the record of events */
    of_dtype dtype;
    bool mixed; /* as of_inputs has it */
    of_device device;
    int64_t numel;
    fake_buffer *param;
    fake_buffer *grad; /* NULL: none */
    fake_buffer *state[OF_MAX_STATE];
    size_t n_state;
    bool lacks_state; /* collect() finds no state */
    bool broken;      /* collect() fails */
    bool shared;      /* defer() refuses */
    bool exclusive;   /* to be launched by itself */
    bool owned;       /* a plan has it */
    int prefetched;   /* calls of prefetch() with it */
    const void *collected; /* the parameter's memory, as the last collect() has found it */
    int again;             /* calls of collect() that found the inputs of the last one */
    int drops;
    double step;               /* updates committed */
    float *step_at;            /* the same, on the device; or NULL */
    fake_buffer *factor;       /* on a device: what of_plan_scale() multiplies by */
    fake_buffer *used_on_look; /* collect() uses this buffer */
    const void *awaits;        /* its gradient is on its way; or NULL */
    const void *product;       /* its gradient is one; or NULL */
    int64_t rows, panel_rows;  /* of that */
    const of_program *program; /* of a rule that runs programs */
    void (*on_collect)(void *arg);
    void (*on_release)(void *arg);
    void *arg;
} fake_tensor;

struct fake_host {
    of_host table; /* what the core gets */
    bool consumes; /* settle() takes the gradient away: backward mode */
    bool refuses;  /* begin() and make_state() say no */
    atomic_int begun;        /* calls of begin() that said yes; */
    atomic_int begun_adding; /* of those, for passes that only add */
    atomic_int made;         /* calls of make_state() */
    void (*on_begin)(void *arg);
    void *arg;
    bool flushes_on_release;
    int watched; /* updates in ranges that watch() began */
    int ranges;  /* of these, those that have not ended */
    bool holds_inside; /* holds live in the updates, not on the heap */
    int n_threads;
    fake_tensor tensors[FAKE_MAX_TENSORS];
    int n_tensors;
    atomic_int holds;     /* collected and not released */
    atomic_int regions;   /* calls of parallel_for() */
    pthread_mutex_t lock; /* guards events */
    bool recording;
    char events[8192];
    char last_log[512];
};

fake_host *fake_host_new(void);
/* Before the plan is made: it has functions for profilers. */
void fake_host_watches(fake_host *host);
/* Fails the test if a hold is left or an owned tensor was not dropped once. */
void fake_host_free(fake_host *host);

fake_buffer *fake_buffer_new(size_t bytes); /* zeros */
void fake_buffer_retain(fake_buffer *buffer);
void fake_buffer_release(fake_buffer *buffer);

fake_tensor *fake_tensor_new(fake_host *host, of_dtype dtype, int64_t numel, size_t n_state);
/* Another parameter in the same memory, with state of its own. */
fake_tensor *fake_tensor_alias(fake_tensor *tensor);
/* Takes over the reference; NULL: no gradient. */
void fake_set_grad(fake_tensor *tensor, fake_buffer *grad);

/* An operator uses the buffer: launches what is pending on it, and returns its
 * bytes. foreign: on a thread that isn't the host's. */
const void *fake_use(fake_buffer *buffer, bool foreign);

/* The events since the last call, as "collect:0 commit:0 ..." */
void fake_record(fake_host *host);
const char *fake_events(fake_host *host);

#endif
