/* SPDX-License-Identifier: BSD-3-Clause */
/* shim.h: the C ABI between the Python loader and the shared library that
 * joins the core (optfuse.h) to libtorch.
 *
 * Tensors cross as arguments of the operators that the library registers in
 * the namespace `optfuse` (operators.cpp lists them); everything else is here. A
 * plan is an opaque pointer made by of_shim_plan_new() and freed once by
 * of_shim_plan_free().
 *
 * The loader keeps every parameter alive from set_slots() until the plan is
 * cleared or freed.
 *
 * No exception leaves these functions. Those that return an int give an
 * of_status; on anything but 0 of_error_message() says what happened. Only
 * of_shim_ledger_...() and of_shim_are_...() need the GIL. of_shim_flush() and
 * the functions that only report may be called from any thread at any time; the
 * others, like the optimizer itself, from one thread at a time.
 */
#ifndef OPTFUSE_SHIM_H
#define OPTFUSE_SHIM_H

#include "optfuse.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct of_shim_plan of_shim_plan;

/* Once per process: registers the first-use fallback and the fork handlers.
 * error_type: borrowed PyObject* of the Python exception class that errors
 * raised inside operators and backward arrive as, alive for ever. OF_REFUSED if another library owns
 * the dispatch key, or Python lacks a function that the library calls. */
OF_API int of_shim_init(void *error_type);
/* Likewise, after it and before the first plan: the library's messages go to receive(level, text),
 * called on the main thread; level: 0 error, 1 warning, 2 info, 3 debug. Else they go to stderr. */
OF_API void of_shim_log_to(void *receive);

/* Where liboptfuse_cuda.so is, to be opened at the first GPU tensor. Before the
 * first plan; "" if there is none. */
OF_API void of_shim_set_cuda_library(const char *path);

/* of_rules_text (kernels.h): the names and the order of each rule's state and options. */
OF_API const char *of_shim_rules(void);

/* mode: of_mode. isa: as for of_isa_parse(), or "" for the best. bucket_bytes:
 * of one bucket's parameters; 0 for the default: what is worth a launch on a GPU, or all
 * threads of the CPU. passes: of_plan_options.passes. */
OF_API int of_shim_plan_new(const char *rule, int mode, const char *isa, size_t bucket_bytes,
                            size_t passes, of_shim_plan **out);
/* Launches what is pending and gives the plan up: its gradient hooks stay but do
 * nothing, and the last of them frees it. */
OF_API void of_shim_plan_free(of_shim_plan *plan);

/* of_plan_clear(): afterwards the plan has no slots and no groups. */
OF_API int of_shim_clear(of_shim_plan *plan);
OF_API int of_shim_group(of_shim_plan *plan, size_t group, const double *hyper, size_t n_hyper);

/* The ledger of an optimizer of Python (loader/reader.h). These functions need the GIL
 * (ctypes.PyDLL) and give it up while updates run. optimizer: a borrowed PyObject*. Where they
 * fail Python's exception is set. What the library asks of the loader's Link meanwhile arrives where it
 * asked if that raises, an Exception as optfuse.Error and others (KeyboardInterrupt) by their type.
 * Ctrl-C comes before or after it, never inside. */

/* Traits of a plan, which the loader's Link names when it has told parameters. */
enum of_shim_trait {
    OF_SHIM_ASKS = 1,          /* the loader begins and ends each step: there are no kernels, or
                                  parameters are sharded */
    OF_SHIM_READS_SCALE = 2,   /* updates read grad_scale and found_inf of the optimizer */
    OF_SHIM_COUNTS_PASSES = 4, /* of_plan_options.passes is not 1, or final mode: each is looked at */
    OF_SHIM_IS_SHARDED = 8,    /* there are DTensors among the parameters */
    OF_SHIM_BY_CLASS = 16      /* final mode: the class's own step() makes all updates */
};
enum { OF_SHIM_LEFT = -1 }; /* nothing was done: that is left to the optimizer's class */

/* Before anything else is told. optimizer, link: weak references; scaled: a set that lives for
 * ever, empty as long as no loss has been scaled. */
OF_API void of_shim_ledger_open(of_shim_plan *plan, void *optimizer, void *link, void *scaled);
/* Tells the plan of all groups and parameters from the start. */
OF_API int of_shim_ledger_rebuild(of_shim_plan *plan, void *optimizer);
/* unless_watched: OF_SHIM_LEFT if of_shim_is_profiled(). */
OF_API int of_shim_ledger_step(of_shim_plan *plan, void *optimizer, bool unless_watched);
/* The step() of one parameter: its update is launched. */
OF_API int of_shim_ledger_step_slot(of_shim_plan *plan, void *optimizer, size_t slot);
/* may_drop: nothing but of_shim_is_profiled() stands against dropping the gradients here.
 * OF_SHIM_LEFT: the gradients are still there. */
OF_API int of_shim_ledger_zero_grad(of_shim_plan *plan, void *optimizer, bool may_drop);
OF_API int of_shim_ledger_tell_options(of_shim_plan *plan, void *optimizer);
/* The plan must be told of the state anew. */
OF_API void of_shim_ledger_forget_state(of_shim_plan *plan);
/* An update has made an entry of the state, or run through it. is_new: the state had none. */
OF_API void of_shim_ledger_note_entry(of_shim_plan *plan, size_t slot, bool is_new);

/* of_plan_step(). */
OF_API int of_shim_step(of_shim_plan *plan, size_t *needs, size_t capacity, size_t *n_needs);

/* of_plan_step_slot(). */
OF_API int of_shim_step_slot(of_shim_plan *plan, size_t slot, bool at_once);
/* Around a backward pass that was started inside of another one, on this thread. */
OF_API void of_shim_begin_nested_pass(void);
OF_API void of_shim_end_nested_pass(void);

/* of_plan_flush(), or of_plan_drain(). On the thread that called of_shim_step() last, outside of
 * backward and while no other thread is in step(), it also takes the mark off every parameter and
 * state tensor that is not in flight, and sets *cleaned; elsewhere that is left to their first use,
 * as it is for gradients. Gradients on their way are waited for first, of every optimizer. */
OF_API int of_shim_flush(of_shim_plan *plan, bool drain, bool *cleaned);
/* Waits for the gradients that are still on their way to the parameters of one model (the `group`
 * of optfuse::expect), or of all (-1). OF_REFUSED if a reduction has failed. */
OF_API int of_shim_await(int64_t group);
OF_API bool of_shim_unconfirmed(of_shim_plan *plan);
/* Puts the slots whose state others hold, too (shares_state()), at `slots`; returns how many, at
 * most `capacity`. */
OF_API size_t of_shim_sharing_state(of_shim_plan *plan, size_t *slots, size_t capacity);
/* of_plan_is_updated(). */
OF_API bool of_shim_is_updated(of_shim_plan *plan, size_t slot);
/* The number of the gradient that it was updated with, for set_slots(); 0: it is not. */
OF_API uint64_t of_shim_used(of_shim_plan *plan, size_t slot);
/* Backward mode, before the first backward: updates on a GPU run on a side
 * stream, beside the rest of backward. */
OF_API void of_shim_update_beside(of_shim_plan *plan);
/* Before the first parameters are told: gradients of linear layers' weights may be promises
 * (promises/promise.h). forced: of layers of any size, at once. */
OF_API void of_shim_promise_gradients(of_shim_plan *plan, bool forced);
/* Float32 parameters on a GPU may have bfloat16 state, if the rule has kernels for that: their bits
 * are those of this release of PyTorch, which takes such state. */
OF_API void of_shim_take_mixed(of_shim_plan *plan);
/* Backward mode: updates that lack state are left to step(), before which the script's hooks may
 * make it; or not. */
OF_API void of_shim_leave_stateless(of_shim_plan *plan, bool left);
/* Clipping and unscaling write the plan's gradients themselves, by PyTorch's operators. */
OF_API void of_shim_write_gradients(of_shim_plan *plan);
/* Gradients of at least so many elements wait to be multiplied, others are multiplied at once.
 * Returns what it was. */
OF_API int64_t of_shim_wait_from(int64_t numel);
/* Whether our norms are used: 0 not tried yet, 1 they have the bits of PyTorch's operator, 2 the
 * operator is used. */
OF_API int of_shim_norms_tried(void);
/* Computes those of the process that nobody has computed: what comes next may read memory past the
 * dispatcher. */
OF_API void of_shim_keep_promises(void);
/* memory/heap.h, of_heap_keep(). */
OF_API bool of_shim_keep_memory(void);
/* The gradients of the i-th layer whose weight is large enough, by what became of them, in uses since
 * the plan was made: promised, of these updated panel by panel and looked at, and computed as a whole.
 * label, because: valid until the next call on this thread; the reason of the last whole one, or "".
 * False: there is no i-th. */
typedef struct of_shim_promise_counts {
    const char *label;
    const char *because;
    uint64_t promised;
    uint64_t panels;
    uint64_t made;
    uint64_t whole;
} of_shim_promise_counts;
OF_API bool of_shim_count_promises(of_shim_plan *plan, size_t i, of_shim_promise_counts *out);
/* of_plan_add_only(), of_plan_restart_count(). */
OF_API void of_shim_add_only(of_shim_plan *plan, int entered);
OF_API void of_shim_restart_count(of_shim_plan *plan);
OF_API void of_shim_stop_deferring(of_shim_plan *plan);
OF_API int of_shim_counts(of_shim_plan *plan, of_counts *out);
OF_API const char *of_shim_isa(of_shim_plan *plan, int dtype);

/* Whether a profiler or another observer of PyTorch's functions is at work, on this
 * thread or on all. */
OF_API bool of_shim_is_profiled(void);
/* Whether one of them looks at the tensors that functions get. */
OF_API bool of_shim_inputs_are_profiled(void);
/* From here to of_shim_end_recompute() on the same thread a forward pass is made once more, inside of
 * backward: an operator that gets a parameter which one of these plans has updated since step()
 * raises. The caller keeps the optimizers alive meanwhile, and no other thread changes their groups.
 * Pairs may be nested; after an error nothing has begun. */
OF_API int of_shim_begin_recompute(of_shim_plan *const *plans, size_t n);
OF_API void of_shim_end_recompute(void);
/* Whether C++ code that asks for the address of a consumed gradient gets an error, which is the
 * default, or a null pointer. */
OF_API void of_shim_seal_consumed(bool sealed);

/* Calls step(*arguments, **keywords), with the GIL: a callable, a tuple, and a dict or NULL. The
 * operators that it calls are recorded, and run together before this returns (recorded/tape.h).
 * plan: of backward mode, which finds out whether the next one can run ahead of its gradients; or
 * NULL. Returns what step() returns; NULL: Python's exception is set. */
OF_API struct _object *of_shim_recorded_step(of_shim_plan *plan, struct _object *step,
                                             struct _object *arguments, struct _object *keywords);
/* Likewise at the beginning of a backward pass, behind optfuse::begin_ahead. .grad of each of params
 * is the tensor of `gradients` in its place (lists); those whose .grad step() sets to None are
 * appended to `dropped`. Its lines run as updates of their parameters. */
OF_API struct _object *of_shim_step_ahead(of_shim_plan *plan, struct _object *step,
                                          struct _object *arguments, struct _object *params,
                                          struct _object *gradients, struct _object *dropped);
/* Backward mode of a class that is registered. From here on .grad of these parameters, a list, is None in
 * of_shim_step_alone(). */
OF_API void of_shim_hide_gradients(of_shim_plan *plan, struct _object *params);
/* Calls the class's own step(*arguments), in which .grad of this parameter is what it is. */
OF_API struct _object *of_shim_step_alone(of_shim_plan *plan, struct _object *step,
                                          struct _object *arguments, struct _object *param);
/* How often these calls have asked for .grad of a parameter that had none. */
OF_API int64_t of_shim_looks_in_vain(of_shim_plan *plan);
/* Runs what this thread has recorded, with the GIL; ends: the rest of step() is not recorded; orders:
 * step() waits for streams. */
OF_API int of_shim_play_recorded(bool ends, bool orders);
/* From here on Tensor.data, grad and _version, attributes of Python that are written in C, are read
 * and written with regard to it. head_bytes: of an object without attributes. */
OF_API int of_shim_watch_attributes(void *data, void *grad, void *version, size_t head_bytes);
/* Whether this thread is in it. */
OF_API bool of_shim_is_recording(void);
/* The counts of this thread's last one: lines; how often they were run; operators that ran at once;
 * programs and operators that were run. */
OF_API void of_shim_recorded_counts(int64_t counts[5]);

/* A list of Python's: whether each item is exactly of one of two types; and whether all are
 * different ones and none is `without` (false where memory is short, too). */
OF_API bool of_shim_are_of(void *list, void *type, void *other);
OF_API bool of_shim_are_once(void *list, void *without);
/* Whether the attribute of this name, a string, is this very value in each object of a list. */
OF_API bool of_shim_are_in(void *values, void *list, void *name);
/* Appends .grad of the DTensors of these slots to a list, or None. False: of some that is no object of
 * Python. */
OF_API bool of_shim_are_gradients(of_shim_plan *plan, void *slots, void *list);
/* From here on a function of Python that is written in C calls `first`, a callable: with self, if
 * it is a method, and with the arguments, before it does anything. What `first` makes of self, or of
 * the arguments of a function, if not None, is used in the place of self, or of the first argument
 * by position. name: of the function; head_bytes: of an object without
 * attributes. With the GIL; OF_REFUSED if it is called in no known way. */
OF_API int of_shim_call_first(void *function, const char *name, size_t head_bytes, bool is_method,
                              void *first);

#ifdef __cplusplus
}
#endif
#endif
