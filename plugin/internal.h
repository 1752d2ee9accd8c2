/* SPDX-License-Identifier: BSD-3-Clause */
/* internal.h: the structs behind optfuse.h.
 *
 * Life of an update: a record is taken from the plan's pool, filled by
 * collect(), committed, entered in the registry under its keys, and then
 * either launched at once or left pending in the plan's list. Launching runs
 * the kernel, settles, and takes the keys out. The hold is released and the
 * record goes back to the pool when no plan lock is held any more.
 *
 * Locks, in the order in which they may be taken:
 *   plan->layout   slots and groups; written by step, add_slot, set_group and
 *                  clear, read by gradient. The one lock that is held while
 *                  the host's expect(), collect(), commit() and release() run.
 *   plans list     which plans exist
 *   plan->lock     everything about updates; held by a launch. Nobody holds
 *                  two, except around a fork.
 *   registry lock  the table of keys; a leaf
 */
#ifndef OPTFUSE_INTERNAL_H
#define OPTFUSE_INTERNAL_H

#include <pthread.h>
#include <stdalign.h>
#include <stdatomic.h>

#include "guard.h"
#include "optfuse.h"
#include "scale.h"
#include "stores.h"

typedef struct of_update of_update;

/* A list of updates, in order of creation. */
typedef struct of_list {
    of_update *first;
    of_update *last;
    size_t count;
    size_t bytes; /* of parameters */
} of_list;

struct of_update {
    of_plan *plan; /* constant */
    of_update *prev;
    of_update *next; /* in a list or in the pool */
    of_inputs in;
    const of_kernel *kernel;
    size_t slot;
    size_t bytes;
    size_t n_registered; /* how many of in.keys are in the registry; its lock */
    int64_t first_chunk; /* position in the flat chunk space of its launch */
    int64_t n_chunks;
    bool pending;  /* in plan->pending; plan->lock, false in the pool */
    bool deferred; /* defer() said yes */
    /* In a lane's list: launched on a device, not known to be done. Written
     * with plan->lock held. */
    atomic_bool flying;
    of_update *next_flying;
    atomic_int holders; /* the list of what is to be released, and a lane */
    bool counted;       /* its step counter on the device is that of this update */
    bool scaling;       /* multiplies a gradient: scale.c; in plan->scalings if pending */
    /* Of a scaling; or of an update whose gradient has one. Those of a scaling
     * that is registered belong to the registry's lock. */
    unsigned n_factors;
    double factors[OF_MAX_FACTORS];
    of_scale_fn *scale;      /* NULL: no factors */
    float norm;              /* of a scaling: see of_scale_factors() */
    unsigned floating;       /* floating.h: of the thread that created it, as its launch has it */
    const of_update *reader; /* of a scaling on a device: the last that was given its factor */
    alignas(16) unsigned char scalars[OF_MAX_SCALARS];
    /* the host's hold_bytes follow */
};

typedef struct of_slot {
    void *tensor;
    size_t group;
    bool eager;
    bool updated; /* backward mode: since the last step(); plan->lock */
} of_slot;

/* A stream on which a plan launches, and what it has left running there. */
typedef struct of_lane {
    of_stream stream;
    of_update *first; /* in flight, oldest first */
    of_update *last;
    size_t count;
    void *fence;   /* event behind the first `fenced` of them; the host's */
    size_t fenced; /* 0: no fence is out */
    unsigned uses; /* of what is in flight, since then */
    void *event;   /* for waits of other streams */
} of_lane;

/* Scalars of the step value last asked for. */
typedef struct of_prepared {
    double step; /* 0: stale */
    alignas(16) unsigned char scalars[OF_MAX_SCALARS];
} of_prepared;

/* One parameter group with its scalars, since nearly always all parameters of a
 * group are at the same step. */
typedef struct of_group {
    double hyper[OF_MAX_HYPER];
    unsigned used;           /* bit i: state[i] is needed */
    of_prepared prepared[2]; /* by of_device */
} of_group;

struct of_plan {
    of_host host; /* constant, like all up to the locks */
    const of_rule *rule;
    of_mode mode;
    of_reference reference;
    size_t vector_bytes;
    size_t bucket_bytes[2]; /* by device; 0: none */
    of_isa isa;
    const of_kernel *kernels[OF_DTYPE_COUNT]; /* of the CPU; NULL: none */

    atomic_size_t users; /* references of hosts */
    atomic_size_t refs;  /* all users together hold one; of_touch() one while it runs */
    of_plan *older;      /* in the list of plans; the list's lock */
    of_plan *newer;

    pthread_rwlock_t layout;
    of_slot *slots;
    size_t n_slots;
    size_t slots_capacity;
    of_group *groups;
    size_t n_groups;

    pthread_mutex_t lock;
    of_list pending; /* backward mode: the open bucket */
    of_list scalings;
    size_t n_updated;
    of_list forked; /* launched in of_fork_prepare(), to be released after it */
    bool stopped;   /* no more deferring */
    of_lane *lanes;
    size_t n_lanes;
    of_stores stores;  /* of what is on the CPU, in backward mode */
    char failure[512]; /* of a launch; "": none. Nothing is right after one */
    of_counts counts;

    /* The pool. `spare`, like a group's scalars, belongs to whoever has
     * layout written, or layout read and the lock. Records come back through
     * `returned` without a lock. */
    of_update *spare;
    _Atomic(of_update *) returned;
};

typedef enum of_reason { OF_AT_ONCE, OF_AT_USE, OF_AT_CLOSE } of_reason;

/* update.c: lists and the pool */
void of_list_append(of_list *list, of_update *update);
void of_list_remove(of_list *list, of_update *update);
of_update *of_pool_take(of_plan *plan); /* NULL: no memory, error is set */
void of_pool_give(of_plan *plan, of_update *update);
void of_inputs_clear(of_update *update); /* before collect() */
void of_pool_free(of_plan *plan);
/* Completes what collect() left open, or sets the error: kernel, scalars. */
of_status of_update_complete(of_plan *plan, of_update *update);
/* Releases the holds and returns the records; no plan lock held. */
void of_updates_release(of_plan *plan, of_list *list);
void of_update_drop(of_update *update); /* one of its holders is done with it */

/* launch.c: all with plan->lock held. What was launched ends up in *done,
 * whose holds the caller releases after unlocking. */
void of_launch(of_plan *plan, of_list *list, of_reason reason, of_list *done);
void of_launch_one(of_plan *plan, of_update *update, of_reason reason, of_list *done);
void of_launch_bucket(of_plan *plan, of_update *first, of_list *done); /* at its use */
void of_discard_pending(of_plan *plan, of_list *done); /* without running: a guard is off */
void of_settle(of_plan *plan, of_list *list, of_list *done);
bool of_apply(of_plan *plan, of_update *update);   /* by the host's operators */
bool of_goes_past_caches_now(const of_plan *plan); /* of_counts.past_caches */

/* device.c: with plan->lock held. Runs a list of updates that are on devices. */
void of_device_launch(of_plan *plan, of_list *list, of_list *done);

/* lane.c: with plan->lock held */
bool of_stream_equal(const of_stream *a, const of_stream *b);
/* Puts a launched update in flight; false: no memory. */
bool of_lane_add(of_plan *plan, of_update *update);
/* Makes `after` wait for all that is on `before` now. */
bool of_stream_order(of_plan *plan, const of_stream *before, const of_stream *after);
/* Makes the current streams wait for what is in flight on others. */
bool of_lanes_join(of_plan *plan);
/* Forgets what is known to be done. at_use: asks only now and then, and tells the host. */
void of_lanes_land(of_plan *plan, bool at_use);
void of_lanes_fence(of_plan *plan);  /* lets that be known of all that is in flight */
void of_lanes_forget(of_plan *plan); /* forgets all: joined at the end of backward */
/* Waits for the devices, then forgets all; false: they can't be waited for, and all stays. */
bool of_lanes_drain(of_plan *plan);
void of_lanes_free(of_plan *plan);
/* The status of whoever launched: OF_REFUSED and the message after a failure. */
of_status of_plan_health(const of_plan *plan);
void of_plan_fail(of_plan *plan); /* notes the message of this thread */

/* scale.c */
const void *of_scale_key(const void *key);                  /* a gradient's, for its scaling */
void of_scaling_prepare(of_plan *plan, of_update *scaling); /* plan->lock held */
void of_launch_scalings(of_plan *plan, of_list *done);      /* plan->lock held */
void of_launch_scalings_with(of_plan *plan, of_update *first, of_list *done); /* the same */
void of_launch_readers(of_plan *plan); /* what must come before that, without the lock */
/* Gives an update on a device the factor that is pending on its gradient, if it is
 * on the update's stream; no lock of a plan held. */
void of_scaling_share(of_plan *plan, of_update *update);

/* bucket.c: a record for the slot, for a call with layout read */
of_status of_take_for_slot(of_plan *plan, size_t slot, of_update **update);
/* Backward mode, plan->lock held: the slot is updated, until step(); OF_TWICE if it
 * was already. And it is not. */
of_status of_claim(of_plan *plan, size_t slot);
void of_unclaim(of_plan *plan, size_t slot);

/* fork.c: whether this process was forked since the library was loaded. */
bool of_is_forked(void);

/* touch.c */
of_status of_plan_launch(of_plan *plan); /* what is pending, but no scaling */

/* create.c: with plan->lock held */
bool of_create_pending(of_plan *plan, of_update *update, of_list *batch, of_list *done);
void of_create_now(of_plan *plan, of_update *update, of_list *batch, of_list *done);

/* registry.c: memory identity -> update */
typedef enum of_added { OF_ADDED, OF_ADD_CONFLICT, OF_ADD_NO_MEMORY } of_added;
/* Enters the first n keys, all or none. On a conflict *key is taken by another
 * update, *own, or by one of another plan (*own is NULL). */
of_added of_registry_add(of_update *update, size_t n, const void **key, of_update **own);
void of_registry_remove(of_list *list);
void of_registry_remove_one(of_update *update);
/* Takes one key from an update that is in flight. */
void of_registry_take(const void *key);
/* The update with this key, with a reference to its plan; or NULL. */
of_update *of_registry_find(const void *key);
bool of_registry_has_scalings(void); /* no lock */
/* The factors of the scaling with this key, 1 where there is none; how many. */
unsigned of_registry_factors(const void *key, double factors[OF_MAX_FACTORS], float *norm);
bool of_registry_has(const void *key);
/* Whether this update is in flight, and still the last that has this key. */
bool of_registry_flies(const void *key, const of_update *update);
/* Whether an update of another plan has this key and is not in flight. */
bool of_registry_waits_elsewhere(const void *key, const of_plan *plan);
/* Adds one to it; false: there is none, or it has no room. */
bool of_registry_add_factor(const void *key, double factor);
void of_registry_lock(void);
void of_registry_unlock(void);

/* plans.c: every plan of the process */
void of_plans_add(of_plan *plan);
void of_plans_remove(of_plan *plan);
void of_plans_each(void (*visit)(of_plan *plan)); /* without a lock */
/* Locks the list and every plan->lock; visits each plan when it is locked. */
void of_plans_lock(void (*visit)(of_plan *plan));
void of_plans_unlock(void);
void of_plans_adopt(void); /* in a forked child, with all of them locked */

/* plan.c */
void of_plan_unref(of_plan *plan);

/* error.c */
of_status of_fail(of_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* log.c */
enum { OF_LOG_ERROR, OF_LOG_WARNING, OF_LOG_INFO, OF_LOG_DEBUG };
bool of_log_wanted(int level);
void of_log(const of_host *host, int level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
