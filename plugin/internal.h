/* SPDX-License-Identifier: BSD-3-Clause */
/* internal.h: the structs behind optfuse.h, and what each file offers to those above it.
 *
 * Life of an update: a record is taken from the plan's pool, filled by
 * collect(), committed, entered in the registry under its keys, and then
 * either launched at once or left pending in the plan's list. Launching runs
 * the kernel, settles, and takes the keys out. The references are released and the
 * record goes back to the pool when no plan lock is held any more.
 *
 * Locks, in the order in which they may be taken:
 *   plan->layout   slots and groups; written by step, updates in backward, add_slot,
 *                  set_group and clear, read by a scaling. The one lock that is held while
 *                  the host's prefetch(), collect() and commit() run.
 *   plans list     which plans exist
 *   plan->lock     everything about updates and passes; held by a launch. A thread holds
 *                  at most one, except around a fork.
 *   registry lock  the tables of keys; a leaf
 *
 * clang's thread-safety annotations are not used: in C, guarded_by() cannot name a member of
 * the same struct ("undeclared identifier"), so that no field could say which lock guards it.
 * tests/run has ThreadSanitizer watch the suites of this folder instead.
 */
#ifndef OPTFUSE_INTERNAL_H
#define OPTFUSE_INTERNAL_H

#include <pthread.h>
#include <stdalign.h>
#include <stdatomic.h>

#include "fail.h"
#include "fence.h"
#include "floating.h"
#include "guard.h"
#include "lock_free.h"
#include "optfuse.h"
#include "scale.h"
#include "store_policy.h"

typedef struct of_update of_update;

/* A list of updates, in order of creation. */
typedef struct of_list {
    of_update *first;
    of_update *last;
    size_t count;
    size_t bytes; /* of parameters */
} of_list;

typedef enum of_reason { OF_AT_ONCE, OF_AT_USE, OF_AT_CLOSE } of_reason;

/* The kinds of work that can be pending on memory: updates, and scalings of gradients. Both may be
 * pending on the same memory: each kind has a table of keys and a list in the plan. */
enum { OF_UPDATES, OF_SCALINGS, OF_KINDS };
typedef struct of_kind {
    int index;
    bool is_update;       /* counted, and made by the plan's rule */
    const char *gpu_rule; /* NULL: the plan's */
    /* Prepares a launch, with plan->lock held; or NULL. */
    void (*prepare)(of_plan *plan, of_update *update);
    /* Runs elements [begin, end) on the CPU, on any thread. */
    void (*run)(const of_update *update, size_t begin, size_t end, bool past_caches);
    /* Its memory is used: launches the update and its neighbours, with plan->lock held. */
    void (*use)(of_plan *plan, of_update *update, of_list *done);
} of_kind;

struct of_update {
    of_link pooled;
    of_plan *plan; /* constant */
    of_update *prev;
    of_update *next; /* in a list */
    const of_kind *kind;
    of_inputs in;
    const of_kernel *kernel;
    const void *factors_of_product; /* while it is launched: of_product_host.begin() */
    size_t slot;
    size_t bytes;
    size_t n_registered; /* how many of in.keys are in the registry, whose lock guards this and `places` */
    uint32_t places[OF_MAX_KEYS]; /* of their entries, if the table has not changed since */
    int64_t first_chunk; /* position in the flat chunk space of its launch */
    int64_t n_chunks;
    bool pending;  /* in a list of plan->pending; plan->lock, false in the pool */
    bool deferred; /* defer() said yes */
    /* In a queue's list: launched on a device, not known to be done. Written
     * with plan->lock held. */
    atomic_bool in_flight;
    of_update *next_in_flight;
    atomic_size_t holders; /* the list of what is to be released, a queue, and a slot */
    bool gone;             /* a scaling whose gradient nobody has any more */
    /* The factors of a scaling; or of an update whose gradient has one. Those of a scaling
     * that is registered belong to the registry's lock. */
    unsigned n_factors;
    double factors[OF_MAX_FACTORS];
    of_average average;      /* made behind it; its program is NULL if there is none */
    of_scale_fn *scale;      /* of a scaling on the CPU */
    float norm;              /* of a scaling: see of_scale_factors() */
    unsigned floating;       /* floating.h: of the thread that created it, as its launch has it */
    atomic_uint readers; /* of a scaling's factor, on a device: updates not launched yet */
    alignas(16) unsigned char scalars[OF_MAX_SCALARS];
    /* the host's reference_bytes follow */
};

typedef struct of_slot {
    void *tensor;
    size_t group;
    bool eager;
    of_update *own; /* its last update's record, which it holds, too; or NULL. As `spare` */
    /* Backward mode, plan->lock: since the last step(); and in which pass it waits, or NULL. */
    bool updated;
    struct of_waiting *waits_in;
} of_slot;

/* Slot numbers, and room for as many more behind them. */
typedef struct of_batch {
    size_t *slots;
    size_t n;
    size_t capacity;
} of_batch;

#define OF_NO_STREAM {.device = -1} /* of the CPU */

/* Gradients that wait for each other before their updates are created: those of one stream, or of
 * the CPU. */
typedef struct of_waiting {
    of_stream on; /* where they are complete */
    of_batch batch;
    size_t bytes; /* of their parameters */
    struct of_waiting *next;
} of_waiting;

struct of_pass {
    of_plan *plan; /* constant, as are the next three after of_pass_begin() */
    of_token token;
    bool only_adds;
    bool is_marked; /* by of_plan_add_only() */
    atomic_size_t refs;
    /* plan->lock: */
    of_pass *next; /* of those under way */
    bool begun;    /* the host has said yes */
    bool over;     /* ended or abandoned */
    bool abandoned;
    of_waiting *waiting; /* one for each stream, perhaps empty */
};

/* A launch on a side stream whose gradients nobody else may use yet. */
typedef struct of_held {
    of_list updates;
    void *event; /* behind it; the host's */
} of_held;

/* The work that a plan has left running on a stream. */
typedef struct of_queue {
    of_stream stream;
    of_update *first; /* in flight, oldest first */
    of_update *last;
    size_t count;
    void *fence;   /* event behind the first `fenced` of them; the host's */
    size_t fenced; /* 0: no fence is out */
    void *event;   /* for waits of other streams */
    float **steps; /* counters of updates that were launched, which are to be counted */
    size_t n_steps, steps_capacity;
    bool counted;  /* some were: other streams wait for that, too */
    of_held held[2]; /* the last launch first */
} of_queue;

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
    int64_t large;          /* in a backward pass an update of so many elements doesn't wait */
    size_t passes_a_step;
    of_isa isa;
    const of_kernel *kernels[OF_DTYPE_COUNT]; /* of the CPU; NULL: none */
    const of_rule *program_rule;              /* of programs, and its kernels there */
    const of_kernel *programs[OF_DTYPE_COUNT];
    /* The host's; the second may be NULL. */
    void (*settle[OF_KINDS])(void *ctx, void *references, bool was_deferred);
    void (*unseal[OF_KINDS])(void *ctx, void *references);

    atomic_size_t users; /* references of hosts */
    atomic_size_t refs;  /* all users together hold one; a pass one; of_access() one while it
                            runs */
    of_plan *older;      /* in the list of plans; the list's lock */
    of_plan *newer;

    pthread_rwlock_t layout;
    of_slot *slots;
    size_t n_slots;
    size_t slots_capacity;
    of_group *groups;
    size_t n_groups;

    pthread_mutex_t lock;
    of_list pending[OF_KINDS]; /* backward mode: those for a side stream */
    of_pass *passes;           /* under way */
    of_pass *spare_pass;       /* NULL, or one to use again; and likewise a batch */
    of_batch spare_batch;
    size_t n_passes;  /* begun since step() */
    int add_only;     /* contexts entered and not left */
    size_t n_updated; /* slots */
    of_list forked;   /* launched in of_fork_prepare(), to be released after it */
    bool stopped;     /* no more deferring */
    of_queue *queues;
    size_t n_queues;
    of_store_policy store_policy; /* of what is on the CPU, in backward mode */
    char failure[512];            /* of a launch; "": none. Nothing is right after one */
    of_counts counts;

    /* The pool. `spare`, like a group's scalars, belongs to whoever has
     * layout written, or layout read and the lock. Records come back through
     * `returned` without a lock. */
    of_link *spare;
    _Atomic(of_link *) returned;
};

static inline bool of_stream_equal(const of_stream *a, const of_stream *b) {
    return a->device == b->device && a->id == b->id && a->capture == b->capture;
}

/* Whether an update is not worth a launch of its own, in a backward pass. */
static inline bool of_waits_for_others(const of_plan *plan, of_device device, size_t bytes,
                                       int64_t numel) {
    return bytes < plan->bucket_bytes[device] && (device != OF_CPU || numel < plan->large);
}

static inline void of_list_append(of_list *list, of_update *update) {
    update->prev = list->last;
    update->next = NULL;
    if (list->last)
        list->last->next = update;
    else
        list->first = update;
    list->last = update;
    list->count++;
    list->bytes += update->bytes;
}

static inline void of_list_remove(of_list *list, of_update *update) {
    if (update->prev)
        update->prev->next = update->next;
    else
        list->first = update->next;
    if (update->next)
        update->next->prev = update->prev;
    else
        list->last = update->prev;
    list->count--;
    list->bytes -= update->bytes;
}

/* Before collect(): all but the inputs. */
static inline void of_update_clear(of_update *update) {
    update->in.references = update + 1;
    update->gone = false;
    update->n_factors = 0;
    update->factors[0] = update->factors[1] = 1.0;
    atomic_init(&update->readers, 0);
    update->average.program = NULL;
    update->floating = of_floating_now();
}

/* From here on files are in the order in which they may call: each those above it.
 * tests/structure computes who calls whom from the objects. */

/* log.c */
enum { OF_LOG_ERROR, OF_LOG_WARNING, OF_LOG_INFO, OF_LOG_DEBUG };
void of_log(const of_host *host, int level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* error.c, and of_fail() of fail.h */
of_status of_check_slot(const of_plan *plan, size_t slot); /* whether there is such a one */
void of_plan_fail(of_plan *plan); /* a launch has failed: notes the message of this thread */
/* The status of whoever launched: OF_REFUSED and the message after a failure. */
of_status of_plan_health(const of_plan *plan);

/* registry.c: memory identity -> update, or scaling */
typedef enum of_added { OF_ADDED, OF_ADD_CONFLICT, OF_ADD_NO_MEMORY } of_added;
/* Enters the first n keys, all or none. On a conflict *key is taken by another
 * update, *own, or by one of another plan (*own is NULL). */
of_added of_registry_add(of_update *update, size_t n, const void **key, of_update **own);
/* Enters all keys of this update and of those behind it in its list, up to `end` (NULL: all) or the
 * first that meets a conflict or finds no room; returns that one. */
of_update *of_registry_add_run(of_update *first, const of_update *end);
/* One more key of an update that has entered all it has; false: no room, or another has it. */
bool of_registry_extend(of_update *update, const void *key);
void of_registry_remove(of_list *list); /* not an empty one */
void of_registry_remove_one(of_update *update);
void of_registry_remove_in_flight(of_update *first, size_t n); /* of a queue */
void of_registry_keep_first(of_update *update); /* the parameter's key, of an update that has it */
/* Takes one key from what is in flight there. */
void of_registry_take(int kind, const void *key);
/* The update with this key, with a reference to its plan; or NULL. */
of_update *of_registry_find(int kind, const void *key);
bool of_registry_has_updates(void); /* no lock */
void of_registry_end_reading(const void *key); /* of the scaling there, if there is one */
/* Whether an update of another plan has this key and is not in flight. */
bool of_registry_waits_elsewhere(const void *key, const of_plan *plan);
/* Adds one to the scaling there; false: there is none, or it has no room. */
bool of_registry_add_factor(const void *key, double factor);
void of_registry_lock(void);
void of_registry_unlock(void);

/* update.c: the pool, and ends */
of_update *of_pool_take(of_plan *plan); /* NULL: no memory, error is set */
void of_pool_give(of_plan *plan, of_update *update);
void of_pool_free(of_plan *plan);
/* Launched: plan->lock held. */
void of_settle(of_plan *plan, of_list *list, of_list *done);
/* Releases the references and returns the records; no plan lock held. */
void of_updates_release(of_plan *plan, of_list *list);
void of_update_drop(of_update *update); /* one of its holders is done with it */

/* plans.c: every plan of the process */
void of_plans_add(of_plan *plan);
void of_pass_free(of_pass *pass); /* or NULL; nothing waits in it */
void of_plan_unref(of_plan *plan);
/* Visits all without a lock; whether every visit was OF_OK, or the last that was not. */
of_status of_plans_each(of_status (*visit)(of_plan *plan));
/* Locks the list and every plan->lock; visits each plan when it is locked. */
void of_plans_lock(void (*visit)(of_plan *plan));
void of_plans_unlock(void);
void of_plans_adopt(void); /* in a forked child, with all of them locked */

/* await.c: updates whose gradient is still on its way */
bool of_is_missing(const of_plan *plan, of_update *update); /* is its; plan->lock held */
/* Waits for what has this key. plan->lock is let go meanwhile: no update is what it was before.
 * False: it will never come. */
bool of_await(of_plan *plan, const void *key);
/* For the gradients of all that is pending; no lock held. OF_REFUSED: one will never come. */
of_status of_await_pending(of_plan *plan);

/* queue.c: with plan->lock held */
/* Puts a launched update in flight; false: no memory. */
bool of_queue_add(of_plan *plan, of_update *update);
/* Keeps what was launched on a side stream from *done until two more launches, or until it is let
 * go. */
void of_queue_hold(of_plan *plan, const of_list *launched, of_list *done);
void of_queues_let_go(of_plan *plan, of_list *done);
/* Has the step counters of launched updates counted on their stream; false: no memory. */
bool of_queue_count_later(of_plan *plan, const of_stream *stream, float *const *steps, size_t n);
/* Counts them now: at the end of a pass, of step() and of each launch outside of both, and where
 * somebody may read them. */
void of_count_steps(of_plan *plan);
/* Makes `after` wait for all that is on `before` now. */
bool of_stream_order(of_plan *plan, const of_stream *before, const of_stream *after);
/* Makes the current streams wait for what is in flight on others. */
bool of_queues_join(of_plan *plan);
void of_queues_reap(of_plan *plan); /* forgets what is known to be done */
void of_queues_fence(of_plan *plan);  /* lets that be known of all that is in flight */
void of_queues_forget(of_plan *plan); /* forgets all: joined at the end of backward */
/* Waits for the devices, then forgets all; false: they can't be waited for, and all stays. */
bool of_queues_drain(of_plan *plan);

/* external.c: with plan->lock held. Updates by the host's operators; false: one failed. */
bool of_is_by_host(const of_update *update);
bool of_apply(of_plan *plan, const of_list *list);

/* cpu_launch.c: with plan->lock held. Kernels and scalings on the CPU. */
void of_cpu_launch(of_plan *plan, of_list *list);
void of_run_kernel(const of_update *update, size_t begin, size_t end, bool past_caches);
/* The same with the gradient of these elements elsewhere, at `grad`. */
void of_run_with(const of_update *update, const void *grad, size_t begin, size_t end,
                 bool past_caches);
bool of_goes_past_caches_now(const of_plan *plan); /* of_counts.past_caches */
/* n items on several threads: stored as the plan's policy says, which has its trials here. */
void of_run_stores(of_plan *plan, int64_t n, of_store_fn *run, void *arg);

/* gpu_launch.c: with plan->lock held. Runs a list of updates that are on devices. */
void of_gpu_launch(of_plan *plan, of_list *list, of_list *done);

/* product_launch.c: with plan->lock held. Updates whose gradient is a product. */
/* Those that somebody has computed become like others, with the gradient in memory; the others are
 * taken out of the list. */
of_list of_take_products(of_plan *plan, of_list *list);
/* Runs what was taken. False: a panel could not be computed, and the error is set. */
bool of_product_launch(of_plan *plan, of_list *list);

/* launch.c: all with plan->lock held. What was launched ends up in *done,
 * whose references the caller releases after unlocking. */
extern const of_kind of_update_kind;
void of_launch(of_plan *plan, of_list *list, of_reason reason, of_list *done);
void of_launch_one(of_plan *plan, of_update *update, of_reason reason, of_list *done);
/* All of a kind, but for updates whose gradient is missing. */
void of_launch_pending(of_plan *plan, int kind, of_list *done);
void of_discard_pending(of_plan *plan, of_list *done); /* without running */

/* pending.c: with plan->lock held */
typedef enum of_entered {
    OF_ENTERED,
    OF_NOT_ENTERED, /* left pending: launch it now. Launched now: it was, unregistered */
    OF_IN_THE_WAY   /* an update of another plan, or one whose gradient is missing, has *key:
                       nothing was done but for the batch, which is launched. The caller
                       overtakes it and calls again */
} of_entered;
/* Enters the keys of this update and of those behind it that can be left pending, all together.
 * Returns the first for which it has to be called again, or NULL. plan->lock stays held until
 * all that entered are pending or in a batch. */
of_update *of_enter_run(of_update *first);
/* Leaves an update pending. What is in the way is launched, and the batch before it. */
of_entered of_enter_pending(of_plan *plan, of_update *update, of_list *batch, of_list *done,
                            const void **key);
/* Registers an update that is launched with the batch, to which it is added. */
of_entered of_enter_batch(of_plan *plan, of_update *update, of_list *batch, of_list *done,
                          const void **key);

/* access.c */
of_accessed of_multiply_at(const void *key, bool foreign); /* as of_launch_at(): the scaling */

/* scaling.c */
/* Gives an update on a device the factor that is pending on its gradient, if it is
 * on the update's stream; no lock of a plan held. */
void of_scaling_share(of_plan *plan, of_update *update);
void of_launch_readers(of_plan *plan); /* what must come before scalings, without the lock */

/* inputs.c: completes what collect() left open, or sets the error: kernel, scalars. again: but for
 * addresses, keys and counts the inputs are those for which it did so before. */
of_status of_update_complete(of_plan *plan, of_group *group, of_update *update, bool again);

/* flush.c */
of_status of_plan_launch(of_plan *plan); /* what is pending, but no scaling */

/* transaction.c: updates of many slots, all or none. With layout written. */
typedef struct of_chosen { /* which slots */
    const size_t *slots;   /* NULL: all that backward has not updated */
    size_t n;
    bool in_backward;
} of_chosen;
typedef struct of_named { /* slots that lack state, the one that failed, or those set apart */
    size_t *slots;
    size_t capacity;
    size_t n;
} of_named;
void of_name(of_named *named, size_t slot);
void of_name_only(of_named *named, size_t slot);
/* Everything that can fail happens here, before anything has changed. */
of_status of_collect_all(of_plan *plan, const of_chosen *of, of_list *created, of_named *named);
/* Certain from here on: leaves updates pending, or launches together those that are not;
 * exclusive ones by themselves. */
void of_commit_all(of_plan *plan, of_list *created, bool defer, of_list *done);
/* The same for one, which is exclusive or not. What is to be released ends up in *done. */
void of_commit_one(of_plan *plan, of_update *update, bool defer, of_list *done);
/* For an update that was committed, with plan->lock held, which is let go and taken again
 * where an update of another plan is in the way. False: it can't be left pending. */
bool of_leave_pending(of_plan *plan, of_update *update, of_list *batch, of_list *done);
void of_add_to_batch(of_plan *plan, of_update *update, of_list *batch, of_list *done);

/* backward.c: updates the slots of a batch, or one; *at as in of_pass_ready() */
of_status of_update_batch(of_plan *plan, const of_batch *batch, size_t *at);
of_status of_update_slot(of_plan *plan, size_t slot, size_t *at);
void of_confirm(of_plan *plan); /* no slot is updated; plan->lock held */
bool of_confirm_slot(of_plan *plan, size_t slot); /* false: it is not updated; the same lock */

/* pass.c */
void of_passes_forget(of_plan *plan); /* what waits is left to step(); plan->lock held */

#endif
