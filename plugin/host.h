/* SPDX-License-Identifier: BSD-3-Clause */
/* host.h: what the core asks of its host, who owns tensors and threads: one table that
 * every host fills in, and optional ones for backward fusion, GPUs (gpu_host.h), scalings
 * of gradients, gradients that arrive late, gradients that are a product nobody has computed and
 * updates by the host's own operators. Each table begins with its size in the host's build, so that
 * a host of another release is refused.
 *
 * No lock that of_access() needs is held while prefetch(), collect(), commit(), release(),
 * drop(), begin() and make_state() run. The first five may cause calls of of_access() and
 * of_any_pending(), and read of_plan_rule(), of_plan_hyper() and of_plan_state_used(), but must
 * not call the other functions of the same plan. begin() and make_state() may call everything but
 * the functions of passes. All others run under the lock of one plan and must not call back, but
 * where they say so.
 */
#ifndef OPTFUSE_HOST_H
#define OPTFUSE_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu_host.h"
#include "kernels.h"
#include "program.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Keys: the memory of parameter, gradient, state, step counter and other counters; and of an
 * average. */
enum { OF_ABI_VERSION = 20, OF_MAX_KEYS = 4 + OF_MAX_STATE };

/* The findings of collect(). */
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
    float *step_at;             /* the state's counter, if it is on the device; or NULL. Counted
                                   when the backward pass ends at the latest: valid until then */
    const float *lr_at;         /* scalars on the device, as in of_gpu_update; or NULL. */
    const float *grad_scale_at; /* Nobody may change them until release() */
    const float *found_inf_at;
    const void *factor_at; /* of a scaling: the factor, of the type of the computation. The core
                              hands it on to the updates that apply it: share_factor() */
    /* The other counters, of a rule that has them on the device: of_rule.counts_on_gpu. */
    float *numbers_at[OF_MAX_COUNTERS];
    bool mixed; /* the state is bfloat16, the parameter float32: of a rule that of_rule_mixed() has
                   kernels for */
    bool wide;  /* the state is float32, the parameter of 16 bits: of a rule that rounds */
    const of_program *program; /* of a rule that runs programs: this update's, which reads and
                                  writes no other state than there is */
    const void *keys[OF_MAX_KEYS]; /* identities of the memory involved, for of_access();
                                      the parameter's first */
    const void *grad_key;          /* that of the gradient, if `grad` points to what is there: then
                                      factors of of_plan_scale() are applied to it; or NULL */
    size_t n_keys;
    const void *awaits; /* the gradient's values are not there yet: of_await_host.await() of this
                           comes before the launch; or NULL */
    const void *product; /* the gradient is a product that perhaps nobody has computed, and `grad`
                            is NULL: of_product_host.begin() of this comes at the launch; or NULL.
                            On the CPU only, not of what is exclusive or run by the host */
    int64_t rows;        /* of that product, of numel / rows elements each */
    int64_t panel_rows;  /* how many are computed at a time; whole cache lines of elements */
    /* Set before collect(): */
    unsigned used;    /* bit i: state[i] is needed */
    bool in_backward; /* created inside backward, so that the gradient may go with it; else by
                         step() */
    /* When collect() comes: the rest, but for the references, is what an earlier call for this
     * tensor has left here, and the core since. Set by collect(), of inputs on the CPU without
     * product, factor or counters, that nothing is awaited for: they may come so the next time;
     * and if they came so this time, all that is no address, key or count is still the same, such
     * as the number of elements. */
    bool again;
    bool exclusive;   /* others may see the parameter's memory: launch this
                         update by itself, in the order of the slots, between
                         its commit() and the next slot's; never defer it */
    void *references; /* the host's, until release(): collect() finds reference_bytes
                         of its own here, or puts another pointer */
} of_inputs;

/* A program over memory on the CPU. */
typedef struct of_part {
    void *memory[OF_REGISTER_TEMPORARY]; /* of each register; NULL for those that it does not use */
    int64_t numel;                       /* of each, in the same order */
    of_dtype dtype;
    const of_program *program;
} of_part;

/* Optional: without it there is no backward mode. */
typedef struct of_backward_host {
    uint32_t struct_size; /* sizeof(of_backward_host) of the host's build */
    /* A pass begins: makes current what its updates are going to read. only_adds: the count
     * of passes says that this one has none. May be called for one pass by several threads,
     * and is not for a pass inside of_plan_add_only(). False after of_set_error(): the pass
     * has not begun. */
    bool (*begin)(void *ctx, bool only_adds);
    /* Device, number of elements and bytes of the slot's parameter; *on: on a GPU, the current
     * stream. Under the plan's lock. */
    of_device (*measure)(void *ctx, void *tensor, int64_t *numel, size_t *bytes, of_stream *on);
    /* Makes the optimizer state of a slot. False after of_set_error(). */
    bool (*make_state)(void *ctx, size_t slot);
} of_backward_host;

/* Optional: for of_plan_scale(). */
typedef struct of_scaling_host {
    uint32_t struct_size; /* sizeof(of_scaling_host) of the host's build */
    /* Like of_host.collect(), for the gradient alone: param is its memory, keys[0] the
     * identity of that. OF_FOUND_NOTHING: no gradient, or one that can't be multiplied in
     * place. Then come defer(), settle() and of_host.release(), and no commit(). */
    of_found (*collect)(void *ctx, void *tensor, of_inputs *in);
    /* Like those of of_host. After defer() the references must not keep the gradient alive. */
    bool (*defer)(void *ctx, void *references);
    void (*settle)(void *ctx, void *references, bool was_deferred);
    void (*unseal)(void *ctx, void *references); /* optional */
    /* Whether a gradient with a deferred scaling still exists. */
    bool (*is_alive)(void *ctx, void *references);
    /* The same, and if so keeps it alive until release(). */
    bool (*keep)(void *ctx, void *references);
    /* For gradients on a device: `to`, of an update, keeps what factor_at of `from`, of a
     * scaling, points to. */
    void (*share_factor)(void *ctx, void *to, const void *from);
} of_scaling_host;

/* Optional: for gradients whose values arrive after step(), as those do that are reduced between
 * processes. key: of_inputs.awaits. Must do without a plan, which may be freed meanwhile. */
typedef struct of_await_host {
    uint32_t struct_size; /* sizeof(of_await_host) of the host's build */
    /* Whether the values are there, in the memory that of_inputs.grad points to. Does not
     * wait; under the lock of a plan. */
    bool (*has_arrived)(const void *key);
    /* Waits until they are; no lock held. False after of_set_error(): they will never be. Every
     * later call says so again, and the update is never launched. */
    bool (*await)(const void *key);
} of_await_host;

/* Optional: for gradients that are a product of two thin matrices, as those of linear layers are.
 * Such an update computes a panel of rows at a time, and updates these while the panel is in cache:
 * the gradient itself is never in memory. Must do without a plan. */
typedef struct of_product_host {
    uint32_t struct_size; /* sizeof(of_product_host) of the host's build */
    /* Under the lock of a plan. What rows() takes, until end(); or NULL: somebody has computed the
     * product, and all of it is at *grad. key: of_inputs.product. */
    const void *(*begin)(const void *key, const void **grad);
    /* Computes rows [first, end), of consecutive elements, into memory of the calling thread, which
     * stays as it is until the thread's next call. NULL after of_set_error(). Panels are begun in
     * the order of rows, so one may wait for those before. */
    const void *(*rows)(const void *product, int64_t first, int64_t end);
    void (*end)(const void *product);
} of_product_host;

/* Optional: for programs that the host runs. */
typedef struct of_external_host {
    uint32_t struct_size; /* sizeof(of_external_host) of the host's build */
    /* Does the update. False after of_set_error(): it failed. The one function that may call back:
     * of_plan_run_programs(). */
    bool (*apply)(void *ctx, of_inputs *in);
} of_external_host;

/* Function pointers marked optional, and tables, may be NULL. Tables live as long as the
 * process. */
typedef struct of_host {
    uint32_t abi_version;   /* OF_ABI_VERSION */
    uint32_t struct_size;   /* sizeof(of_host) of the host's build */
    void *ctx;              /* first argument of every function of every table */
    size_t reference_bytes; /* room in each update for the host's references,
                               aligned to 16; may be 0 */

    /* Looks up the gradient and state of `tensor` and fills in *in. Changes
     * nothing that a user can see. If it returns OF_FOUND_INPUTS it has taken
     * the references that keep every pointer in *in valid until
     * release(in->references); else it keeps nothing. *in comes zeroed
     * but for in->references, in->used and in->in_backward, or with in->again.
     * OF_FOUND_NOTHING inside backward also says that the update is left to step(),
     * because others may see the parameter's or the gradient's memory and would miss when
     * stock changes it. */
    of_found (*collect)(void *ctx, void *tensor, of_inputs *in);
    /* optional: collect() comes next for these, one after the other, so that the host can
     * have their records fetched together. Changes nothing and can't fail. */
    void (*prefetch)(void *ctx, void *const *tensors, size_t n);
    /* The update is now certain: advances the step counter, bumps version
     * counters. Called once per update, no lock held, before defer or launch.
     * If in->exclusive it may replace the pointers of *in by those of dense copies,
     * which release() writes back. */
    void (*commit)(void *ctx, of_inputs *in);
    /* Makes every access to the update's memory call of_access() first and
     * returns true; or returns false, and the update is launched at once,
     * because someone else may see the memory. */
    bool (*defer)(void *ctx, void *references);
    /* optional: the same for the average of a pending update (of_average_behind()), under the
     * plan's lock. The references keep its memory and its program until release(), and settle()
     * lifts this, too. */
    void (*defer_average)(void *ctx, void *references, void *average);
    /* optional: comes before the settle() calls that end a launch, on the same thread; not where
     * updates stay in flight on a device. */
    void (*begin_settling)(void *ctx);
    /* The kernel has run (was_deferred: after defer() returned true): lifts
     * what defer() did, marks the gradient as consumed in backward mode. */
    void (*settle)(void *ctx, void *references, bool was_deferred);
    /* optional, for hosts whose defer() makes uses of the memory fail that come past its marks.
     * Called where memory order is weak (fence.h), before settle() of what was deferred: lifts
     * that, and no mark. Every thread passes a fence before this, and another one between this and
     * settle(), which lifts what is left. What stays in flight on a device comes to settle() alone. */
    void (*unseal)(void *ctx, void *references);
    /* Drops the references. */
    void (*release)(void *ctx, void *references);
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
    /* optional, both or neither: around a launch of n updates on the CPU, for profilers;
     * references: of the first. watch() returns what unwatch() takes, on the same thread, or
     * NULL if nobody looks. */
    void *(*watch)(void *ctx, const void *references, size_t n);
    void (*unwatch)(void *ctx, void *watched);
    /* optional; level: 0 error, 1 warning, 2 info, 3 debug. Gets every message: OPTFUSE_LOG is
     * for stderr. No lock of a plan held, but after a launch that failed. */
    void (*log)(void *ctx, int level, const char *message);
    /* optional: square roots as the reference's library takes them (of_span);
     * for values of float32, and of float64. Called by many threads at once. */
    of_roots_fn *square_roots[2];

    const of_backward_host *backward;
    const of_gpu_host *gpu; /* without it collect() must give updates on the CPU only */
    const of_scaling_host *scaling;
    const of_external_host *external;
    const of_await_host *await; /* without it no update awaits anything */
    const of_product_host *product; /* without it all gradients are in memory */
} of_host;

#ifdef __cplusplus
}
#endif
#endif
