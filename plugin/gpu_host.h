/* SPDX-License-Identifier: BSD-3-Clause */
/* gpu_host.h: what the core asks of a host whose parameters may be on a
 * device that works on its own, in streams.
 *
 * An update belongs to the stream that is current when it is created, its home stream, and is
 * launched there: by step(), or in a backward pass. A scaling of a gradient, and an update that is
 * left pending inside a pass, are launched later: the user's own synchronisation may have come
 * before, and does not order other streams after it. So they stay in the registry, in flight,
 * until the device is known to have done them: a stream that uses their memory meanwhile is made
 * to wait for the home stream.
 */
#ifndef OPTFUSE_GPU_HOST_H
#define OPTFUSE_GPU_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* gpu_update.h has their members. */
typedef struct of_gpu_update of_gpu_update;
typedef struct of_gpu_entry of_gpu_entry;

/* A stream of a device. `id` is the host's name for it. */
typedef struct of_stream {
    int device; /* ordinal */
    int64_t id;
    uint64_t capture; /* the graph that was being captured on it; 0: none */
} of_stream;

/* The host's part. None of these waits for the device but synchronize(). They
 * run under the lock of a plan and must not call back. Those that return a
 * bool give false after of_set_error(), is_done() also if the work is not done. */
typedef struct of_gpu_host {
    uint32_t struct_size; /* sizeof(of_gpu_host) of the host's build */
    /* The calling thread's current stream of a device. */
    of_stream (*current)(void *ctx, int device);
    /* Makes another one current. */
    void (*exchange)(void *ctx, const of_stream *stream);
    /* Adds 1 to n step counters on the stream, behind the updates that read them; then, if less_at
     * is not NULL, subtracts *less_at. */
    bool (*count)(void *ctx, const of_stream *stream, float *const *steps, size_t n,
                  const float *less_at);
    /* Puts the update of n tensors on the stream. Refuses if the stream is capturing
     * another graph than `stream` says, as count() does. The update's `device` and `stream`
     * are the host's to fill in; the entries' arrays are those of collect(). */
    bool (*launch)(void *ctx, const of_stream *stream, of_gpu_update *update,
                   const of_gpu_entry *entries, size_t n);
    /* *event stands for all work that is on the stream now. *event is NULL or an
     * event to use again. */
    bool (*record)(void *ctx, const of_stream *stream, void **event);
    /* All later work on the stream waits for the event. */
    bool (*wait)(void *ctx, const of_stream *stream, void *event);
    /* Whether the event's work is done. */
    bool (*is_done)(void *ctx, void *event);
    /* Blocks the calling thread until it is. */
    bool (*synchronize)(void *ctx, void *event);
    void (*destroy)(void *ctx, void *event);
} of_gpu_host;

#ifdef __cplusplus
}
#endif
#endif
