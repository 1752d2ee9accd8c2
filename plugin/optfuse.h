/* SPDX-License-Identifier: BSD-3-Clause */
/* optfuse.h: the core of optfuse, without PyTorch.
 *
 * A plan belongs to one fused optimizer and has one slot per parameter. An
 * update is one parameter, its gradient and the scalars of this step. It is
 * created when its inputs are complete and launched when the schedule says so;
 * in between it is pending, and the host marks its memory so that whatever
 * accesses it calls of_access() first.
 *
 *   forward fusion    of_plan_step() creates every update and leaves it
 *                     pending; of_access() launches it at its first use.
 *   backward fusion   of_pass_ready() says that a gradient is complete in a backward
 *                     pass. The core decides whether its update runs at once, waits for
 *                     its neighbours, or is left to of_plan_step().
 *
 * The core reaches tensors, threads and logs only through the host's tables (host.h).
 *
 * Threads: every function may be called from any thread, but from inside the host's
 * functions as host.h says. A host with a global lock of its own (the GIL) calls without it.
 *
 * Errors: functions that can fail return an of_status; on anything but OF_OK
 * of_error_message() says what happened and what to do, and nothing was
 * changed unless the function says otherwise.
 */
#ifndef OPTFUSE_H
#define OPTFUSE_H

#include "host.h"

#if defined(OF_STATIC)
#define OF_API
#else
#define OF_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum of_status {
    OF_OK = 0,
    OF_INVALID, /* a bad argument or an unsupported parameter, gradient or state */
    OF_NO_MEMORY,
    OF_NEEDS_STATE, /* not an error: optimizer state must be made first, then call again */
    OF_TWICE,       /* backward mode: a second gradient before step() */
    OF_REFUSED      /* the host said no, or a launch failed */
} of_status;

/* OF_FINAL: of_pass_begin() and of_pass_end() as in backward mode; in between the host says of each
 * gradient of_plan_step_slot(), whose update needs no step(). */
typedef enum of_mode { OF_FORWARD, OF_BACKWARD, OF_FINAL } of_mode;

typedef struct of_plan of_plan;

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
     * OF_BUCKET_NONE: every update by itself. On the CPU what has OF_SERIAL_ELEMENTS goes by
     * itself anyway, in backward mode unless the bytes are given here. */
    size_t bucket_bytes[2];
    size_t passes; /* backward and final mode: how many backward passes make one step; all but the
                      last of them only add to the gradients. 0: one */
} of_plan_options;
#define OF_BUCKET_NONE SIZE_MAX
/* A launch on the CPU of fewer elements in all runs on the calling thread: starting
 * the host's threads would cost more. */
enum { OF_SERIAL_ELEMENTS = 16384 };

/* Counts of a plan's updates since its creation, for summary(). */
typedef struct of_counts {
    uint64_t created;
    uint64_t at_once;   /* launched where they were created: not private, eager, large enough */
    uint64_t at_use;    /* launched by of_access() */
    uint64_t at_close;  /* launched with a bucket, by flush or by the next step */
    uint64_t in_step;   /* ran in step(): not left pending, or, in backward mode, not in backward */
    uint64_t pending;   /* now */
    uint64_t launches;  /* parallel regions or single calls */
    uint64_t averages;  /* that were written with their updates */
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
 * another thread is just then in of_access() or of_flush_all(), its release() of
 * what it launched may come a little later: release() must do without ctx. If what is
 * in flight on a device can't be waited for, the plan stays in order that others wait for
 * it: the functions of of_gpu_host must do without ctx, too. */
OF_API void of_plan_release(of_plan *plan);

/* Adds a parameter group (group == number of groups) or changes the
 * hyper-parameters of one. hyper: as many doubles as the rule has. Updates
 * already created keep their scalars. */
OF_API of_status of_plan_set_group(of_plan *plan, size_t group, const double *hyper,
                                   size_t n_hyper);

/* Copies the hyper-parameters of a group, as many doubles as the rule has; zeros: there is no such
 * group. */
OF_API void of_plan_get_group(of_plan *plan, size_t group, double *hyper);

/* Adds a slot for one parameter. The plan owns `tensor` from here on, also on
 * failure, and gives it back through drop(). eager: never left pending. */
OF_API of_status of_plan_add_slot(of_plan *plan, void *tensor, size_t group, bool eager,
                                  size_t *slot_out);
/* Launches everything pending and drops every slot and group. Gradients that wait in a pass
 * are left to a later step(). */
OF_API void of_plan_clear(of_plan *plan);

OF_API const of_rule *of_plan_rule(const of_plan *plan);
/* Hyper-parameters of a slot's group, n_hyper doubles, valid until changed. */
OF_API const double *of_plan_hyper(const of_plan *plan, size_t slot);
/* With these; bit i: state[i] is needed. */
OF_API unsigned of_plan_state_used(const of_plan *plan, size_t slot);

/* optimizer.step(). First collects all slots; if one fails, or lacks state,
 * nothing has been changed. On OF_NEEDS_STATE *needs (room for capacity slot
 * numbers) is filled and *n_needs says how many lack state in all; call again
 * once they have it. Forward mode: creates an update for every gradient.
 * Backward mode: closes the bucket, then updates every parameter that has a
 * gradient and was not updated since the last step, also those that still waited in a pass;
 * the count of passes starts over. */
OF_API of_status of_plan_step(of_plan *plan, size_t *needs, size_t capacity, size_t *n_needs);
/* The same for one slot. Not at_once: a small update is left pending until those that are have a
 * bucket's bytes. Backward mode: if backward has updated the slot, that is confirmed.
 * OF_NEEDS_STATE: nothing was done; call again once it has it. */
OF_API of_status of_plan_step_slot(of_plan *plan, size_t slot, bool at_once);

/* One backward pass of a plan. Several may be under way, each on threads of its own. */
typedef struct of_pass of_pass;
/* Tells the backward passes of a process from each other. */
typedef uint64_t of_token;
#define OF_NO_TOKEN ((of_token)0) /* of no pass: a host numbers its passes from 1 on */
#define OF_NO_SLOT SIZE_MAX

/* The pass of this token that is under way, or a new one. *out: the caller's reference.
 * *first: for exactly one caller, who has to see to its end. A new pass only adds to the
 * gradients inside of_plan_add_only(), and if the plan's count of passes since step() says
 * so; that is settled here for all of the pass. OF_REFUSED: the host's begin() said no; the
 * pass has not begun, and is not counted. */
OF_API of_status of_pass_begin(of_plan *plan, of_token token, of_pass **out, bool *first);
OF_API void of_pass_retain(of_pass *pass);
/* The last reference of a pass that has not ended abandons it. */
OF_API void of_pass_release(of_pass *pass);
OF_API bool of_pass_only_adds(const of_pass *pass);
/* Says that the gradient of this slot is complete in this pass. Whoever completes gradients
 * calls it once for each, on any thread, also after of_pass_end(); on a device, where the stream
 * on which it is complete is the current one. The update runs at once, or the gradient waits for
 * its neighbours (a small one), or is left to step(): if the pass only adds or was abandoned, if
 * the host's collect() says so, or if the gradient of another pass waits for the same slot.
 * OF_TWICE: the slot was already updated since step(). On a failure *slot_at is the slot that it concerns, perhaps another
 * one that waited, or OF_NO_SLOT; the updates that would have run with it are left to
 * step(). */
OF_API of_status of_pass_ready(of_pass *pass, size_t slot, size_t *slot_at);
/* Runs what waits in this pass, which goes on. */
OF_API of_status of_pass_run(of_pass *pass, size_t *slot_at);
/* Runs what waits, and has the current streams wait for what was launched on others. The
 * token is free. Does nothing the second time. */
OF_API of_status of_pass_end(of_pass *pass, size_t *slot_at);
/* The pass has failed: what waits in it, and what is ready later, is left to step(). */
OF_API void of_pass_abandon(of_pass *pass);

/* Enters (+1) or leaves (-1) a context: passes that begin inside only add to the gradients. */
OF_API void of_plan_add_only(of_plan *plan, int entered);
/* The count of passes starts over: the gradients of those before were thrown away. */
OF_API void of_plan_restart_count(of_plan *plan);
/* Backward mode: how many slots were updated that no step() has confirmed. */
OF_API size_t of_plan_unconfirmed(of_plan *plan);
/* Backward mode: whether this one was; and, for a host that has cleared the
 * plan and adds the slots again between backward and step(), that it was. */
OF_API bool of_plan_is_updated(of_plan *plan, size_t slot);
OF_API void of_plan_set_updated(of_plan *plan, size_t slot);

/* Launches what is pending: of a plan in backward or final mode, of any plan, of every plan. The current
 * streams wait for what was launched on others. OF_REFUSED if a launch failed; of_flush_all()
 * flushes the other plans all the same. */
OF_API of_status of_plan_close(of_plan *plan);
OF_API of_status of_plan_flush(of_plan *plan);
OF_API of_status of_flush_all(void);
/* Also waits until the devices have done it: nothing is in flight afterwards. OF_REFUSED
 * if they can't be waited for: then everything stays in flight. */
OF_API of_status of_plan_drain(of_plan *plan);

/* Runs n programs on the CPU by the kernels of their dtypes, side by side: none may use what another
 * one writes. A host may call it from of_external_host.apply(), of an update whose program is
 * by_host. OF_INVALID for another plan. */
OF_API of_status of_plan_run_programs(of_plan *plan, const of_part *parts, size_t n);

/* Multiplies the gradient of a slot by a factor, rounding to its
 * dtype: at its first use, and in the updates created until then as they read
 * it. norm: of the result, kept for of_scale_factors(); NaN: not known. Not
 * *scaled: the host's of_scaling_host.collect() found nothing. On a device the factor is
 * the one that it names, `factor` is not used, and one can be
 * pending at a time: a second one has the first applied. After
 * of_plan_stop_deferring() it is left to the host there: not *scaled. */
OF_API of_status of_plan_scale(of_plan *plan, size_t slot, double factor, float norm, bool *scaled);
/* How many factors are pending on a gradient's memory, at most 2; 1 for those
 * that are not there. *norm: that of the gradient with them, or NaN. */
OF_API unsigned of_scale_factors(const void *key, double factors[2], float *norm);
/* Whether this memory is a gradient that is still to be multiplied. A host may
 * ask in settle(). */
OF_API bool of_is_scaled(const void *key);
OF_API bool of_any_scaled(void); /* whether any memory is; no lock */
/* Whether an update whose inputs are ready on this stream may be created on this
 * gradient as it is: it is not scaled, or was on the same stream, so that the
 * update can apply the factor itself. Else collect() calls of_access() first. */
OF_API bool of_scaling_fits(const void *key, const of_stream *ready);
/* Forgets what is left of gradients that are gone. */
OF_API void of_plan_sweep(of_plan *plan);

typedef enum of_accessed {
    OF_NOTHING_PENDING, /* on this memory */
    OF_LAUNCHED,
    OF_IN_FLIGHT,    /* launched, now or before, on a device; the current stream waits
                        for it, but another one that uses the memory must access it too */
    OF_ACCESS_FAILED /* see of_error_message(); the memory must not be used */
} of_accessed;

/* of_access() without the scaling: for a host that is about to use a gradient's
 * memory knowing of_is_scaled(). */
OF_API of_accessed of_launch_at(const void *key, bool foreign);
/* Launches the update that is pending on this memory, if there is one, and what
 * belongs into a bucket with it; then the memory's scaling, if any. Waits for the
 * update's gradient if that is still on its way (of_await_host). foreign: the
 * calling thread is neither the one that called step() nor one of the host's
 * engine threads. */
OF_API of_accessed of_access(const void *key, bool foreign);
/* An average of a parameter: memory of as many elements of the same dtype, of which a program makes
 * the next average. To the program the average is the parameter, and the parameter the gradient,
 * which it only reads; it reads and writes no state. */
typedef struct of_average {
    const void *param_key; /* that of the parameter's memory */
    const void *key;       /* that of the average's, for of_access() */
    void *memory;
    int64_t numel;
    of_dtype dtype;
    const of_program *program;
    void *host; /* for of_host.defer_average() */
} of_average;
/* Has an average made by the launch of the update that is pending on the parameter, from the updated
 * elements while they are in cache. False, with nothing done, if none is pending there, if it runs
 * on a device or by the host, has an average already or was created with another setting of
 * denormals than this thread's: then the caller makes the average itself. */
OF_API bool of_average_behind(const of_average *average);
/* Whether an update is pending on this memory, or in flight. */
OF_API bool of_is_pending(const void *key);
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
/* Whether this process is such a child. It has none of its parent's threads, and to start the host's
 * may hang: what stock computes on one thread has to stay on one. */
OF_API bool of_is_forked(void);

#ifdef __cplusplus
}
#endif
#endif
