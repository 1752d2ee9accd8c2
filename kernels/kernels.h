/* SPDX-License-Identifier: BSD-3-Clause */
/* kernels.h: the C ABI of the update kernels.
 *
 * A rule is one optimizer's update formula. A kernel is one rule compiled for
 * one reference, element type, device and instruction set; the kernels form a
 * table of const rows that the plugin, the checker and the benchmarks
 * enumerate. Every row of one (rule, reference, dtype) gives the same bits.
 */
#ifndef OPTFUSE_KERNELS_H
#define OPTFUSE_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Limits of a rule: state tensors (of rules with a formula, and of any, which may run programs),
 * counters, options; and bytes of its prepared scalars. On a GPU these are at most as large as
 * OF_MAX_HYPER doubles. */
enum {
    OF_FORMULA_STATE = 4,
    OF_MAX_STATE = 8,
    OF_MAX_COUNTERS = 2,
    OF_MAX_HYPER = 14,
    OF_MAX_SCALARS = 192
};

/* Bytes of a cache line, on x86-64 and on Arm's own cores; and of two of the longest vectors of a
 * reference, which nothing may cut that is divided between threads. A processor with longer lines
 * is asked for some of them twice by a prefetch, no more: no struct is aligned to lines in order to
 * keep what several threads write apart, for which they would have to be the longest there are. */
enum { OF_CACHE_LINE = 64 };

typedef enum of_dtype { OF_FLOAT32, OF_FLOAT64, OF_BFLOAT16, OF_FLOAT16, OF_DTYPE_COUNT } of_dtype;

typedef enum of_device { OF_CPU, OF_CUDA } of_device;

/* OF_ISA_C is the plain C row, one element at a time: the yardstick. The baseline is SSE2 on
 * x86-64, NEON on AArch64; SVE is code for vectors of any length. */
typedef enum of_isa {
    OF_ISA_C,
    OF_ISA_BASELINE,
    OF_ISA_AVX2,
    OF_ISA_AVX512,
    OF_ISA_SVE,
    OF_ISA_COUNT
} of_isa;

/* The implementation of PyTorch whose bits a row reproduces: its fused CPU
 * kernel as compiled for AVX2 (fused multiply-adds), which also serves CPUs
 * with AVX-512, or as compiled for plain x86-64 (none); on AArch64 as compiled
 * for NEON, or for SVE vectors of 32 bytes (those that its source spells out); or
 * its fused CUDA kernel; or its CUDA operators, one after the other.
 * docs/numerics.md has the formulas.
 *
 * Of the last two the table has only plain C rows, which run on the CPU: the
 * yardstick of kernels/cuda/. Those of CUDA's fused kernel take an of_cuda_scalars,
 * those of its operators what the rule's prepare_gpu() makes, or the address of a program. */
typedef enum of_reference {
    OF_REF_CPU_FUSED,
    OF_REF_CPU_FUSED_PLAIN,
    OF_REF_CUDA_FUSED,
    OF_REF_CUDA_OP_BY_OP,
    OF_REF_COUNT
} of_reference;

typedef void of_roots_fn(void *values, size_t n);

/* A run of consecutive elements of one parameter. param, state[] are updated
 * in place; grad is only read. All hold elements of the row's dtype, need no
 * alignment beyond that of one element, and do not overlap. Unused state
 * pointers are NULL. The last `tail` of the n elements take the reference's
 * scalar formula, the others its vector formula. */
typedef struct of_span {
    void *param;
    const void *grad;
    void *state[OF_MAX_STATE];
    size_t n;
    size_t tail;
    /* NULL, or two by which the gradient is multiplied first, one after the
     * other, each product rounded to the row's dtype as in memory. The rows of
     * CUDA's fused kernel take it from their scalars. */
    const double *factors;
    /* NULL, or what takes square roots in place as the reference's own library
     * does, which may not round correctly: of n floats; of doubles for float64. */
    of_roots_fn *square_roots;
    /* Others have just read the parameter, and nobody is about to use it again: its
     * stores may go past the caches. A hint, taken where param is aligned to a cache
     * line; rows may ignore it. */
    bool past_caches;
    /* For rules that round (of_rule.rounds): the place of the span's first element in the
     * parameter's memory, and the number that the optimizer has for the parameter. They name the
     * random integers (rules/draws.h). */
    uint64_t first;
    uint32_t parameter;
    bool wide_state; /* the state is float32, and the row's dtype has 16 bits */
} of_span;

typedef void of_kernel_fn(const of_span *span, const void *scalars);

/* The scalars of one update in the fused CUDA kernel's formula. The bias
 * corrections are handed in, because the GPU's power function is not the
 * CPU's; they and lr hold values of the type of the computation. */
typedef struct of_cuda_scalars {
    double hyper[OF_MAX_HYPER]; /* in the rule's order; lr is not read from here */
    double lr;
    double correction1; /* 1 - beta1^t */
    double correction2; /* sqrt(1 - beta2^t) */
    /* NULL, or what the gradient is multiplied by before anything else, the product
     * rounded to the dtype. */
    const double *factor;
    double grad_scale; /* what the gradient is divided by, if `unscaled` is given */
    void *unscaled;    /* where the divided gradient goes; may be the gradient; or NULL */
    bool first;        /* the first update of the parameter */
    bool early;        /* see of_cuda_early() */
} of_cuda_scalars;

typedef struct of_kernel {
    const char *rule;
    of_reference reference;
    of_dtype dtype;
    of_device device;
    of_isa isa;
    of_kernel_fn *run;
} of_kernel;

/* The numbers that an update changes beside its tensors. */
typedef struct of_count {
    double step; /* number of this update of the parameter, from 1 */
    double counters[OF_MAX_COUNTERS];
    bool single;      /* the counters are kept in float32, not in float64 */
    bool made_single; /* a number becomes a float32 tensor on its way there: the default dtype */
} of_count;

typedef struct of_rule {
    const char *name;         /* "adam", "sgd" */
    const char *const *state; /* n_state keys of torch.optim's state, in of_span order */
    size_t n_state;
    const char *const *hyper; /* n_hyper names, in the order of the hyper[] arrays; */
    size_t n_hyper;           /* booleans are 0.0 or 1.0 */
    size_t scalars_size;      /* bytes, at most OF_MAX_SCALARS */
    /* Bit i is set if state[i] is used under these hyper-parameters. */
    unsigned (*state_used)(const double *hyper);
    /* Fills `scalars` (scalars_size bytes, aligned for double) for one update.
     * count->counters: as they are before it; on return, as they are after it. */
    void (*prepare)(const double *hyper, of_count *count, void *scalars);
    /* The same for its kernels on GPUs, at most as much as OF_MAX_HYPER doubles; counters
     * that are there (counts_on_gpu) it leaves to them. NULL: they take the options
     * themselves, or there are none. */
    void (*prepare_gpu)(const double *hyper, of_count *count, void *scalars);
    bool counts; /* torch.optim's state has a "step" */
    /* Keys of the state's other 0-dim tensors, which an update changes; n_counters. */
    const char *const *counters;
    size_t n_counters;
    /* For a parameter on a GPU the step and the counters are there, too, in float32: its
     * kernels read them and make those of the next update. */
    bool counts_on_gpu;
    /* The reference on the CPU is PyTorch's operators, one after the other. */
    bool op_by_op;
    int n_roots; /* square roots among these; not of a program */
    /* The formula is a program (program.h) that comes with each update and says which state it
     * uses; it is all that the scalars hold. */
    bool runs_programs;
    /* It computes in float32 and rounds once, perhaps stochastically: parameters of 16 bits may have
     * float32 state. It has no kernels for float64; those for GPUs have the bits of its rows. */
    bool rounds;
} of_rule;

/* The rules, ended by a row whose name is NULL; and their names and lists as text: see
 * rules/lists.h. */
extern const of_rule of_rules[];
extern const char of_rules_text[];
const of_rule *of_rule_find(const char *name); /* NULL if there is none */
/* Whether the reference takes square roots of its elements in this step. A kernel may compute some
 * that it does not use. */
bool of_rule_takes_roots(const of_rule *rule, const double *hyper, double step);
/* The kernels on GPUs that update float32 parameters whose state is bfloat16, under the name that
 * of_gpu_update and their plain C row have; NULL: the rule has none. */
const char *of_rule_mixed(const of_rule *rule);

/* The kernels, ended by a row whose rule is NULL. */
extern const of_kernel of_kernels[];

/* The best kernel whose ISA is at most `isa`, or NULL. */
const of_kernel *of_kernel_find(const char *rule, of_reference reference, of_dtype dtype,
                                of_device device, of_isa isa);

/* Whether the build has kernels for it and this CPU runs them. */
bool of_isa_runs(of_isa isa);
of_isa of_isa_detect(void); /* the best that runs */
const char *of_isa_name(of_isa isa);
bool of_isa_parse(const char *name, of_isa *out); /* "c", "baseline", "avx2", "avx512", "sve" */

/* How many of a parameter's numel elements, its last ones, take the reference's
 * scalar formula: what does not fill a vector, or two where the reference is
 * single operators. vector_bytes: width of the vectors PyTorch has chosen for
 * this CPU; of more than 32 only 32 count, because neither its fused optimizers
 * nor these operators have an AVX-512 build and run the AVX2 one there. PyTorch
 * splits a parameter between threads at multiples of 64 bytes, so only the span
 * that ends the parameter has a tail. (Single operators split it anywhere;
 * their tails in the middle are those of no span.) The CUDA kernel takes all
 * elements of a tensor in fours, or none: those of an unaligned one are a tail
 * as well, which the caller has to see. */
size_t of_tail(const of_rule *rule, of_reference reference, of_dtype dtype, size_t vector_bytes,
               size_t numel);

/* Whether PyTorch's fused CUDA kernels round in their first way on a chip of
 * this compute capability (docs/numerics.md): that depends on what its compiler
 * made of them for that chip. */
static inline bool of_cuda_early(int major, of_dtype dtype) {
    return major < 10 && (major >= 8 || dtype != OF_BFLOAT16);
}

/* Bytes of an element. */
static inline size_t of_dtype_size(of_dtype dtype) {
    return dtype == OF_FLOAT64 ? 8 : dtype == OF_FLOAT32 ? 4 : 2;
}

static inline const char *of_dtype_name(of_dtype dtype) {
    static const char *const names[OF_DTYPE_COUNT] = {"float32", "float64", "bfloat16", "float16"};
    return names[dtype];
}

#ifdef __cplusplus
}
#endif
#endif
