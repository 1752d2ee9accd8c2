/* SPDX-License-Identifier: BSD-3-Clause */
/* cuda_kernels.h: the C ABI of liboptfuse_cuda.so, the kernels on a GPU.
 *
 * The library holds the compiled kernels and needs nothing but libc; it opens
 * the driver (libcuda.so.1) at the first call. A launch copies the table of
 * tensors into the kernel's arguments: it allocates nothing on the device,
 * copies nothing to it and never waits for it, so it can be captured in a graph.
 *
 * Threads: every function may be called from any thread. A context must be
 * current (PyTorch's device guard sees to that); without one the primary
 * context of `device` is made current.
 */
#ifndef OPTFUSE_CUDA_KERNELS_H
#define OPTFUSE_CUDA_KERNELS_H

#include <stdint.h>

#include "../gpu_update.h"

#ifdef __cplusplus
extern "C" {
#endif

#define OF_CUDA_API __attribute__((visibility("default")))

/* Raised when a struct or a meaning below changes. */
enum { OF_CUDA_ABI_VERSION = 15 };

typedef enum of_cuda_status {
    OF_CUDA_OK = 0,
    OF_CUDA_NO_DRIVER,   /* none installed, or too old for the kernels */
    OF_CUDA_UNSUPPORTED, /* no kernel for this rule, dtype or chip */
    OF_CUDA_INVALID,     /* a bad argument */
    OF_CUDA_FAILED       /* the driver reported an error */
} of_cuda_status;

OF_CUDA_API int of_cuda_abi_version(void);
/* This library's of_rules_text (kernels.h): another one has its options in another order. */
OF_CUDA_API const char *of_cuda_rules(void);

/* Opens the driver; the other calls do it themselves. */
OF_CUDA_API of_cuda_status of_cuda_open(void);

/* Loads the update's kernels (those for its options), the one that counts steps and, if
 * the rule has numbers on the device, the one that makes the next ones, into its device. A first
 * launch does it too, but may then have to wait for the device, which it must not while
 * a graph is captured. */
OF_CUDA_API of_cuda_status of_cuda_prepare(const of_gpu_update *update);
/* For tests: OF_CUDA_FAILED if one of these kernels is not loaded, OF_CUDA_UNSUPPORTED if the
 * driver, one before 12.4, does not say. */
OF_CUDA_API of_cuda_status of_cuda_check_loaded(const of_gpu_update *update);

/* Updates n_entries tensors on update->stream: one launch per table, which has
 * room for several hundred tensors; then, if they have numbers on the device, makes
 * those of the next by launches of their own. The rule "scaling" has no options and no state:
 * the parameter becomes the gradient times *factor_at, and may be the same memory. "adam_mixed" is
 * "adam" for float32 parameters whose state is bfloat16. */
OF_CUDA_API of_cuda_status of_cuda_launch(const of_gpu_update *update,
                                          const of_gpu_entry *entries, size_t n_entries);

/* Adds 1 to n_steps step counts on the device, behind the updates that read them. With less_at,
 * which is of_gpu_update.found_inf_at, then subtracts *less_at, whatever is there. */
OF_CUDA_API of_cuda_status of_cuda_advance(float *const *steps, size_t n_steps,
                                           const float *less_at, int device, void *stream);

/* Launches it on the stream. */
OF_CUDA_API of_cuda_status of_cuda_draw(const of_gpu_draws *draws, int device, void *stream);

/* The functions of packing.h. */
typedef enum of_cuda_packing_task {
    OF_CUDA_PACKING_ADD,
    OF_CUDA_PACKING_MERGE,
    OF_CUDA_PACKING_UNPACK,
    OF_CUDA_PACKING_TASKS
} of_cuda_packing_task;

/* One call of them, with arrays on the device. */
typedef struct of_cuda_packing {
    of_cuda_packing_task task;
    of_dtype dtype; /* float32 or float64 */
    int device;     /* ordinal, used if no context is current */
    void *stream;
    void *to; /* packed, running or matrix: what is written */
    const void *from;
    size_t n;          /* rows, at most OF_CUDA_MOST_ROWS; of merge: elements */
    size_t ld;         /* not of merge */
    double numbers[2]; /* scale; decay and weight; damping */
} of_cuda_packing;

enum { OF_CUDA_MOST_ROWS = 1 << 20 };

/* Loads the kernels of a dtype into the device, as of_cuda_prepare() does. */
OF_CUDA_API of_cuda_status of_cuda_prepare_packing(of_dtype dtype, int device);

/* Launches one on packing->stream. The bits are those of the CPU's rows. */
OF_CUDA_API of_cuda_status of_cuda_pack(const of_cuda_packing *packing);

/* The graph that is being captured on the stream of this device; 0: none. */
OF_CUDA_API of_cuda_status of_cuda_capture(int device, void *stream, uint64_t *id);

/* While a graph is captured somewhere in the process, CUDA forbids other threads
 * calls such as asking for an event, and spoils the capture. Between relax(true)
 * and relax(false) this thread may make them. */
OF_CUDA_API void of_cuda_relax(bool on);

/* This thread's last error, for people; never NULL. */
OF_CUDA_API const char *of_cuda_error(void);

#ifdef __cplusplus
}
#endif
#endif
