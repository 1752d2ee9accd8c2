/* SPDX-License-Identifier: BSD-3-Clause */
/* optfuse.h: the core of optfuse, without PyTorch.
 *
 * A plan belongs to one fused optimizer and has one slot per parameter. An
 * update is one parameter, its gradient and the scalars of this step. It is
 * created when its inputs are complete and launched when the schedule says so;
 * in between it is pending, and the host marks its memory so that whatever
 * touches it calls of_touch() first.
 *
 *   forward fusion    of_plan_step() creates every update and leaves it
 *                     pending; of_touch() launches it at its first use.
 *   backward fusion   of_plan_gradient() creates one update and puts it into
 *                     the open bucket; a full bucket is launched at once.
 *                     of_plan_gradients() creates and launches several together.
 *
 * The core reaches tensors, threads and logs only through the host vtable.
 *
 * Threads: every function may be called from any thread. No lock that
 * of_touch() needs is held while the host's expect(), collect(), commit(), release()
 * and drop() run: they may cause calls of of_touch() and of_any_pending(), and
 * read of_plan_rule() and of_plan_hyper(), but must not call the other
 * functions of the same plan. settle(), defer(), apply() and parallel_for()
 * run under the lock of one plan and must not call back at all. A host with a
 * global lock of its own (the GIL) calls without it.
 *
 * Errors: functions that can fail return an of_status; on anything but OF_OK
 * of_error_message() says what happened and what to do, and nothing was
 * changed unless the function says otherwise.
 */
#ifndef OPTFUSE_H
#define OPTFUSE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device_host.h"
#include "kernels.h"

#if defined(OF_STATIC)
#define OF_API
#else
#define OF_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Keys: the memory of parameter, gradient, state, step counter and other counters. */
enum { OF_ABI_VERSION = 7, OF_MAX_KEYS = 3 + OF_MAX_STATE };

typedef enum of_status {
    OF_OK = 0,
    OF_INVALID, /* a bad argument or an unsupported parameter, gradient or state */
    OF_NO_MEMORY,
    OF_NEEDS_STATE, /* not an error: optimizer state must be made first, then call again */
    OF_TWICE,       /* backward mode: a second gradient before step() */
    OF_REFUSED      /* the host said no */
} of_status;

typedef enum of_mode { OF_FORWARD, OF_BACKWARD } of_mode;

typedef struct of_plan of_plan;

/* What collect() found. */
typedef enum of_found {
    OF_FOUND_NOTHING,     /* no gradient, or the parameter no longer exists */
    OF_FOUND_INPUTS,      /* inputs are filled in */
    OF_FOUND_NEEDS_STATE, /* there is a gradient but no optimizer state yet */
    OF_FOUND_ERROR        /* the host called of_set_error() */
} of_found;

/* The inputs of one update, as the host sees them. */
typedef struct of_inputs {
    void *param;
    const void *grad;
    void *state[OF_MAX_STATE];
    int64_t numel;
    of_dtype dtype;
    of_device device;
    of_count count; /* with the counters as they are before this update; when
                       commit() comes, as they are after it */
    /* For a device other than the CPU only: */
    of_stream ready;            /* where the inputs are complete: the current stream */
    of_stream stream;           /* where the update belongs: the same one; or, in backward
                                   mode, a side stream, which is made to wait for it */
    float *step_at;             /* the state counter, if it is on the device; or NULL */
    const float *lr_at;         /* scalars on the device, as in of_cuda_update; or NULL. */
    const float *grad_scale_at; /* Nobody may change them until release() */
    const float *found_inf_at;
    const void *factor_at; /* of a scaling: the factor, of the type of the computation. The core
                              hands it on to the updates that apply it: share_factor() */
    /* The other counters, of a rule that has them on the device: of_rule.counts_on_gpu. */
    float *numbers_at[OF_MAX_COUNTERS];
    const void *keys[OF_MAX_KEYS]; /* identities of the memory involved, for of_touch();
                                      the parameter's first */
    const void *grad_key;          /* that of the gradient, if `grad` points to what is there: then
                                      factors of of_plan_scale() are applied to it; or NULL */
    size_t n_keys;
    bool in_backward; /* set before collect(): created inside backward, so that the gradient
                         may go with it; else by step() */
    bool alone;       /* others may see the parameter's memory: launch this
                         update by itself, in the order of the slots, between
                         its commit() and the next slot's; never defer it */
    void *hold;       /* the host's references, until release(): collect() finds
                         hold_bytes of its own here, or puts another pointer */
} of_inputs;

/* The host: who owns tensors and threads. Function pointers marked optional
 * may be NULL. */
typedef struct of_host {
    uint32_t abi_version; /* OF_ABI_VERSION */
    uint32_t struct_size; /* sizeof(of_host) of the host's build */
    void *ctx;            /* first argument of every function below */
    size_t hold_bytes;    /* room in each update for the host's references,
                             aligned to 16; may be 0 */

    /* Looks up the gradient and state of `tensor` and fills in *in. Changes
     * nothing that a user can see. If it returns OF_FOUND_INPUTS it has taken
     * the references that keep every pointer in *in valid until
     * release(in->hold); else it keeps nothing. *in comes zeroed
     * but for in->hold and in->in_backward. */
    of_found (*collect)(void *ctx, void *tensor, of_inputs *in);
    /* optional: collect() comes next for these, one after the other, so that the host can
     * have their records fetched together. Changes nothing and can't fail. */
    void (*expect)(void *ctx, void *const *tensors, size_t n);
    /* The update is now certain: advances the step counter, bumps version
     * counters. Called once per update, no lock held, before defer or launch.
     * If in->alone it may replace the pointers of *in by those of dense copies,
     * which release() writes back. */
    void (*commit)(void *ctx, of_inputs *in);
    /* Makes every access to the update's memory call of_touch() first and
     * returns true; or returns false, and the update is launched at once,
     * because someone else may see the memory. */
    bool (*defer)(void *ctx, void *hold);
    /* The kernel has run (was_deferred: after defer() returned true): lifts
     * what defer() did, marks the gradient as spent in backward mode. */
    void (*settle)(void *ctx, void *hold, bool was_deferred);
    /* Drops the references. */
    void (*release)(void *ctx, void *hold);
    /* The slot is gone: frees `tensor`. */
    void (*drop)(void *ctx, void *tensor);
    /* Runs fn over [0, n) in contiguous ranges, about one for each thread, and
     * returns when all is done. Asked only where threads pay: an item is a few
     * thousand elements. fn never fails and never blocks. */
    void (*parallel_for)(void *ctx, int64_t n, void (*fn)(void *arg, int64_t begin, int64_t end),
                         void *arg);
    /* optional: on how many threads parallel_for() would run now. On one there is nothing to
     * gain for neighbours that run together. */
    int (*threads)(void *ctx);
    /* optional; level: 1 warning, 2 info, 3 debug */
    void (*log)(void *ctx, int level, const char *message);
    /* optional: without it collect() must give updates on the CPU only. Alive
     * as long as the process. */
    const of_device_host *device;

    /* optional: square roots as the reference's library takes them (of_span);
     * for values of float32, and of float64. Called by many threads at once. */
    of_roots_fn *square_roots[2];
    /* optional; for the rules that have no kernels: does the update. hyper: the
     * rule's, as they were when the update was created. On a device other than
     * the CPU: on in->stream. false: it failed, and of_set_error() says why.
     * Called under the lock of the plan; must not call back. */
    bool (*apply)(void *ctx, of_inputs *in, const double *hyper);

    /* optional, all three or none: for of_plan_scale(). Like collect(), for the
     * gradient alone: param is its memory, keys[0] the identity of that. Nothing
     * found: no gradient, or one that can't be multiplied in place. Then come
     * defer(), after which the hold must not keep the gradient alive, settle()
     * and release(), and no commit(). */
    of_found (*collect_gradient)(void *ctx, void *tensor, of_inputs *in);
    /* Whether a gradient with a deferred scaling still exists. */
    bool (*is_alive)(void *ctx, void *hold);
    /* The same, and if so keeps it alive until release(). */
    bool (*keep)(void *ctx, void *hold);
    /* For gradients on a device: `to`, the hold of an update, keeps what factor_at of
     * `from`, the hold of a scaling, points to. Runs under the lock of a plan. */
    void (*share_factor)(void *ctx, void *to, const void *from);
    /* optional: at a use of the plan's memory a device was found to have done the last
     * update of this slot. `key` is what stood for the parameter's memory, and nothing is
     * known by it any more: what defer() has made of its accesses can go. Called under the
     * lock of the plan, on whatever thread. */
    void (*landed)(void *ctx, void *tensor, const void *key);
} of_host;

/* How a plan computes and schedules. Zero means the default. */
typedef struct of_plan_options {
    uint32_t struct_size; /* sizeof(of_plan_options) */
    of_mode mode;
    of_reference reference;
    size_t vector_bytes; /* width of the reference's vectors; 0: 32, which is what ATen's
                            fused optimizers use on every CPU */
    of_isa isa;          /* the best to use; the row chosen is at most this.
                            No default: zero is OF_ISA_C, plain C */
    /* A bucket is launched when its parameters reach this; by of_device.
     * OF_BUCKET_NONE: every update by itself. On the CPU in forward mode what
     * has OF_SERIAL_ELEMENTS goes by itself anyway. */
    size_t bucket_bytes[2];
} of_plan_options;
#define OF_BUCKET_NONE SIZE_MAX
/* A launch on the CPU of fewer elements in all runs on the calling thread: starting
 * the host's threads would cost more. */
enum { OF_SERIAL_ELEMENTS = 16384 };

/* What has happened to a plan, for summary(). Counts since creation. */
typedef struct of_counts {
    uint64_t created;
    uint64_t at_once;   /* launched where they were created: not private, eager, large enough */
    uint64_t at_use;    /* launched by of_touch() */
    uint64_t at_close;  /* launched with a bucket, by flush or by the next step */
    uint64_t pending;   /* now */
    uint64_t launches;  /* parallel regions or single calls */
    uint64_t in_flight; /* now: launched on a device and not known to be done */
    bool threads_seen;  /* a foreign thread used a pending parameter: no more deferring */
    bool past_caches;   /* backward mode, now and by this thread: parameters on the CPU would
                           be stored past the caches */
} of_counts;

/* Version of this library's ABI: OF_ABI_VERSION it was built with. */
OF_API uint32_t of_abi_version(void);

/* The message of the last failure on this thread; never NULL, valid until the
 * next failure on this thread. */
OF_API const char *of_error_message(void);
/* For hosts: sets it (printf format). */
OF_API void of_set_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Makes a plan for the named rule. *host is copied. options may be NULL: all
 * defaults and the best ISA. Fails on an unknown rule or a host of another ABI
 * version. The caller owns one reference. */
OF_API of_status of_plan_create(const of_host *host, const char *rule,
                                const of_plan_options *options, of_plan **out);
OF_API void of_plan_retain(of_plan *plan);
/* Drops a reference; the last one launches what is pending and frees all. If
 * another thread is just then in of_touch() or of_flush_all(), its release() of
 * what it launched may come a little later: release() must do without ctx. If what is
 * in flight on a device can't be waited for, the plan stays in order that others wait for
 * it: the functions of of_device_host must do without ctx, too. */
OF_API void of_plan_release(of_plan *plan);

/* Adds a parameter group (group == number of groups) or changes the
 * hyper-parameters of one. hyper: as many doubles as the rule has. Updates
 * already created keep their scalars. */
OF_API of_status of_plan_set_group(of_plan *plan, size_t group, const double *hyper,
                                   size_t n_hyper);

/* Adds a slot for one parameter. The plan owns `tensor` from here on, also on
 * failure, and gives it back through drop(). eager: never left pending. */
OF_API of_status of_plan_add_slot(of_plan *plan, void *tensor, size_t group, bool eager,
                                  size_t *slot_out);
/* Launches everything pending and drops every slot and group. */
OF_API void of_plan_clear(of_plan *plan);

OF_API const of_rule *of_plan_rule(const of_plan *plan);
/* Hyper-parameters of a slot's group, n_hyper doubles, valid until changed. */
OF_API const double *of_plan_hyper(const of_plan *plan, size_t slot);

/* optimizer.step(). First collects all slots; if one fails, or lacks state,
 * nothing has been changed. On OF_NEEDS_STATE *needs (room for capacity slot
 * numbers) is filled and *n_needs says how many lack state in all; call again
 * once they have it. Forward mode: creates an update for every gradient.
 * Backward mode: closes the bucket, then updates every parameter that has a
 * gradient and was not updated since the last step. */
OF_API of_status of_plan_step(of_plan *plan, size_t *needs, size_t capacity, size_t *n_needs);

/* Backward mode: the gradient of this slot is complete. */
OF_API of_status of_plan_gradient(of_plan *plan, size_t slot);
/* Backward mode: the gradients of n slots, all on the CPU, are; their updates run now,
 * in one launch. If one slot fails or lacks state nothing has been changed. which (room
 * for n): on OF_OK the *n_which slots that of_plan_gradient() has to be called for,
 * because they are alone; on OF_NEEDS_STATE those that lack state, call again once they
 * have it; else the one that failed, or none. */
OF_API of_status of_plan_gradients(of_plan *plan, const size_t *slots, size_t n, size_t *which,
                                   size_t *n_which);
/* Backward mode: how many slots were updated that no step() has confirmed. */
OF_API size_t of_plan_unconfirmed(of_plan *plan);
/* Backward mode: whether this one was; and, for a host that has cleared the
 * plan and adds the slots again between backward and step(), that it was. */
OF_API bool of_plan_is_updated(of_plan *plan, size_t slot);
OF_API void of_plan_set_updated(of_plan *plan, size_t slot);

/* Launches what is pending: the open bucket, one plan, every plan. The current
 * streams wait for what was launched on others. OF_REFUSED if a launch failed. */
OF_API of_status of_plan_close(of_plan *plan);
OF_API of_status of_plan_flush(of_plan *plan);
OF_API void of_flush_all(void);
/* Also waits until the devices have done it: nothing is in flight afterwards. OF_REFUSED
 * if they can't be waited for: then everything stays in flight. */
OF_API of_status of_plan_drain(of_plan *plan);

/* Multiplies the gradient of a slot by a factor, rounding to its
 * dtype: at its first use, and in the updates created until then as they read
 * it. norm: of the result, kept for of_scale_factors(); NaN: not known. Not
 * *scaled: the host's collect_gradient() found nothing. On a device the factor is
 * the one that collect_gradient() names, `factor` is not used, and one can be
 * pending at a time: a second one has the first applied. After
 * of_plan_stop_deferring() it is left to the host there: not *scaled. */
OF_API of_status of_plan_scale(of_plan *plan, size_t slot, double factor, float norm, bool *scaled);
/* How many factors are pending on a gradient's memory, at most 2; 1 for those
 * that are not there. *norm: that of the gradient with them, or NaN. */
OF_API unsigned of_scale_factors(const void *key, double factors[2], float *norm);
/* Whether this memory is a gradient that is still to be multiplied. A host may
 * ask in settle(). */
OF_API bool of_is_scaled(const void *key);
/* Whether an update whose inputs are ready on this stream may be created on this
 * gradient as it is: it is not scaled, or was on the same stream, so that the
 * update can apply the factor itself. Else collect() calls of_touch() first. */
OF_API bool of_scaling_fits(const void *key, const of_stream *ready);
/* Forgets what is left of gradients that are gone. */
OF_API void of_plan_sweep(of_plan *plan);

typedef enum of_touched {
    OF_UNTOUCHED,   /* nothing was pending on this memory */
    OF_TOUCHED,     /* launched */
    OF_IN_FLIGHT,   /* launched, now or before, on a device; the current stream waits
                       for it, but another one that uses the memory must touch it too */
    OF_TOUCH_FAILED /* see of_error_message(); the memory must not be used */
} of_touched;

/* of_touch() without the scaling: for a host that is about to use a gradient's
 * memory knowing of_is_scaled(). */
OF_API of_touched of_launch_at(const void *key, bool foreign);
/* Launches the update that is pending on this memory, if there is one, and what
 * belongs into a bucket with it; then the memory's scaling, if any. foreign: the
 * calling thread is neither the one that called step() nor one of the host's
 * engine threads. */
OF_API of_touched of_touch(const void *key, bool foreign);
/* Whether anything is pending or in flight in the process. Cheap; no lock. */
OF_API bool of_any_pending(void);

/* No update created from now on is left pending. Those that are stay safe:
 * they are launched at their first use as before. */
OF_API void of_plan_stop_deferring(of_plan *plan);

OF_API void of_plan_counts(of_plan *plan, of_counts *out);
/* Name of the kernel's ISA that the plan uses for a dtype. */
OF_API const char *of_plan_isa(const of_plan *plan, of_dtype dtype);

/* Around fork(): prepare launches everything and takes every lock. */
OF_API void of_fork_prepare(void);
OF_API void of_fork_parent(void);
OF_API void of_fork_child(void);

#ifdef __cplusplus
}
#endif
#endif
