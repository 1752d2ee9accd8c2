// SPDX-License-Identifier: BSD-3-Clause
// kernel_check: on a machine with a GPU, compares what the CUDA kernels compute
// with the plain C rows, bit for bit. The bias corrections come from the device,
// whose power function is not the CPU's.
//
//   kernel_check [--seed N] [--rounds N]
#include <string.h>

#include "cuda/cuda_kernels.h"
#include "cuda/table.h"
#include "gpu.h"
#include "packing_check.h"
#include "rules/asgd_foreach.h"
#include "rules/asgd_next.h"

extern "C" {
#include "../kernels/arrays.h"
#include "../kernels/random_program.h"
}

enum { TENSORS = 12, MOST = 50000, PADDING = 256, SCALARS = 4 };

template <class T>
__global__ void corrections(double beta1, double beta2, float step, double *out) {
    out[0] = 1 - ::pow((T)beta1, (T)step);
    out[1] = sqrt(1 - ::pow((T)beta2, (T)step));
}

// Without -fmad=false, so each rounding is spelled out.
__global__ void next_numbers(asgd_schedule of, float step, float *out) {
    const float growth = __fadd_rn(__fmul_rn(step, (float)of.growth), 1.0f);
    out[asgd_eta] = __fmul_rn(__frcp_rn(asgd_power(growth, of.alpha)), (float)of.lr);
    out[asgd_mu] = asgd_next_mu(&of, step);
}

struct tensor {
    arrays mine, wanted;
    unsigned char *device[N_ARRAYS]; // MOST doubles and PADDING bytes each
    size_t offset[N_ARRAYS];
    float step;
    float numbers[ASGD_N_COUNTERS]; // before the update
    float *numbers_at;              // as many on the device, and as many that are wanted
};

static tensor tensors[TENSORS];
static double *device_corrections;
static float *device_scalars; // lr, grad_scale, found_inf, factor, steps
static double *device_factor; // for float64

static double pick(uint64_t *random, const double *values, size_t n) {
    return values[random_next(random) % n];
}

static void random_options(const of_rule *rule, double *hyper, uint64_t *random) {
    static const double betas[] = {0.0, 0.5, 0.9, 0.999}, weights[] = {0.0, 0.01, 0.3};
    static const double rates[] = {1e-3, 0.1}, flags[] = {0.0, 1.0};
    for (size_t i = 0; i < rule->n_hyper; i++) {
        const char *name = rule->hyper[i];
        if (strncmp(name, "beta", 4) == 0 || !strcmp(name, "momentum") ||
            !strcmp(name, "dampening") || !strcmp(name, "alpha") || !strcmp(name, "rho"))
            hyper[i] = pick(random, betas, 4);
        else if (!strcmp(name, "weight_decay"))
            hyper[i] = pick(random, weights, 3);
        else if (!strcmp(name, "lr"))
            hyper[i] = pick(random, rates, 2);
        else if (!strcmp(name, "seed"))
            hyper[i] = (double)(random_next(random) >> 11);
        else
            hyper[i] = !strcmp(name, "eps") ? 1e-8 : pick(random, flags, 2);
    }
}

static size_t random_length(uint64_t *random) {
    const size_t chunk = random_next(random) % 2 ? 8192 : 1024;
    switch (random_next(random) % 3) {
    case 0:
        return chunk * (1 + random_next(random) % 5) - 4 + random_next(random) % 9;
    case 1:
        return random_next(random) % MOST / 4 * 4;
    default:
        return random_next(random) % 100;
    }
}

// The counter is that of the update before.
static const float *upload_step(const tensor *t, size_t index) {
    const float before = t->step - 1.0f;
    float *at = device_scalars + SCALARS + index;
    GPU(cudaMemcpy(at, &before, sizeof before, cudaMemcpyHostToDevice));
    return at;
}

static of_gpu_entry upload(tensor *t, const of_rule *rule, const of_gpu_update &update, bool mixed,
                           unsigned used, size_t index, uint64_t *random) {
    static const double steps[] = {1, 2, 17, 1000};
    const of_dtype dtype = update.dtype;
    const size_t n = random_length(random);
    const size_t shared = random_next(random) % 2 ? 0 : random_next(random) % 16; // elements
    of_gpu_entry entry = {};
    t->mine.mixed = t->wanted.mixed = mixed;
    t->mine.wide = t->wanted.wide = update.wide_state;
    arrays_place(&t->mine, dtype, n, used, random);
    arrays_place(&t->wanted, dtype, n, used, random);
    arrays_fill(&t->wanted, random);
    void *at[N_ARRAYS] = {};
    for (int i = 0; i < N_ARRAYS; i++) {
        const size_t size = of_dtype_size(arrays_dtype(&t->wanted, i));
        t->offset[i] = (random_next(random) % 8 ? shared : random_next(random) % 16) * size;
        GPU(cudaMemset(t->device[i], 0xa5, MOST * sizeof(double) + PADDING));
        if (!t->wanted.at[i])
            continue;
        at[i] = t->device[i] + t->offset[i];
        GPU(cudaMemcpy(at[i], t->wanted.at[i], n * size, cudaMemcpyHostToDevice));
    }
    t->step = (float)pick(random, steps, 4);
    entry.param = at[0];
    entry.grad = at[1];
    for (int i = 0; i < OF_MAX_STATE; i++)
        entry.state[i] = at[2 + i];
    entry.n = n;
    entry.step = t->step;
    entry.parameter = (uint32_t)index;
    if (random_next(random) % 2 && !rule->rounds)
        entry.step_at = upload_step(t, index);
    return entry;
}

// ASGD's counters are all on the device.
static void upload_numbers(tensor *t, of_gpu_entry *entry, size_t index, uint64_t *random) {
    static const double etas[] = {0.01, 0.3}, mus[] = {1.0, 1.0 / 3.0};
    t->numbers[asgd_eta] = (float)pick(random, etas, 2);
    t->numbers[asgd_mu] = (float)pick(random, mus, 2);
    GPU(cudaMemcpy(t->numbers_at, t->numbers, sizeof t->numbers, cudaMemcpyHostToDevice));
    for (int i = 0; i < ASGD_N_COUNTERS; i++)
        entry->numbers_at[i] = t->numbers_at + i;
    entry->step_at = upload_step(t, index);
}

// The scalars of a rule that has them prepared: one set for all tensors of a launch.
static double prepared[OF_MAX_HYPER];

static void prepare(const of_rule *rule, of_gpu_update *update, uint64_t *random) {
    static const double steps[] = {1, 2, 17, 1000};
    of_count count = {};
    count.step = pick(random, steps, 4);
    count.counters[0] = count.counters[1] = 0.9;
    memset(prepared, 0, sizeof prepared);
    rule->prepare_gpu(update->hyper, &count, prepared);
    update->hyper = prepared;
    update->lr_at = update->grad_scale_at = update->found_inf_at = NULL;
}

static of_instruction code[MOST_INSTRUCTIONS]; // of a rule that runs programs
static of_program program;

static bool has_inverse_root() {
    for (size_t i = 0; i < program.n; i++)
        if (code[i].operation == OF_OPERATOR_rsqrt)
            return true;
    return false;
}

// Without the one operator that a CPU has not.
static void take_program(of_gpu_update *update, uint64_t *random) {
    do
        program = random_program(code, false, OF_CUDA_REGISTERS, random);
    while (has_inverse_root());
    update->program = &program;
    update->lr_at = update->grad_scale_at = update->found_inf_at = NULL;
}

static unsigned state_used(const of_rule *rule, const double *hyper) {
    return rule->runs_programs ? (program.reads | program.writes) >> OF_REGISTER_STATE
                               : rule->state_used(hyper);
}

static bool in_fours(const tensor *t, unsigned used) {
    bool all = t->mine.n % 4 == 0;
    for (int i = 0; i < N_ARRAYS; i++) // cudaMalloc aligns to 256 bytes
        if (i < 2 || used >> (i - 2) & 1)
            all = all && t->offset[i] % (4 * of_dtype_size(arrays_dtype(&t->mine, i))) == 0;
    return all;
}

// The scalars with the tensor's own numbers; what these become is left on the device.
static void take_numbers(tensor *t, double *own) {
    asgd_foreach_scalars s;
    memcpy(&s, own, sizeof s);
    s.eta = t->numbers[asgd_eta];
    s.mu = t->numbers[asgd_mu];
    memcpy(own, &s, sizeof s);
    const asgd_schedule of = {s.lr, s.growth, s.alpha, s.t0};
    next_numbers<<<1, 1>>>(of, t->step, t->numbers_at + ASGD_N_COUNTERS);
}

static bool numbers_differ(const tensor *t) {
    float both[2][ASGD_N_COUNTERS];
    GPU(cudaMemcpy(both, t->numbers_at, sizeof both, cudaMemcpyDeviceToHost));
    return memcmp(both[0], both[1], sizeof both[0]) != 0;
}

static void expect(tensor *t, const of_rule *rule, const of_gpu_update &update, of_cuda_scalars s,
                   bool scaled) {
    const unsigned used = state_used(rule, s.hyper);
    const of_dtype dtype = update.dtype;
    double both[2];
    if (dtype == OF_FLOAT64 || t->mine.mixed)
        corrections<double><<<1, 1>>>(s.hyper[1], s.hyper[2], t->step, device_corrections);
    else
        corrections<float><<<1, 1>>>(s.hyper[1], s.hyper[2], t->step, device_corrections);
    GPU(cudaMemcpy(both, device_corrections, sizeof both, cudaMemcpyDeviceToHost));
    s.correction1 = both[0];
    s.correction2 = both[1];
    s.first = t->step <= 1.0f;
    s.unscaled = scaled ? t->wanted.at[1] : NULL;
    of_span span = arrays_span(&t->wanted, in_fours(t, used) ? 0 : t->wanted.n);
    if (rule->prepare_gpu || rule->runs_programs) {
        const double factors[] = {s.factor ? *s.factor : 1.0, 1.0};
        double own[OF_MAX_HYPER];
        memcpy(own, prepared, sizeof own);
        const of_program *runs = &program;
        if (rule->runs_programs)
            memcpy(own, &runs, sizeof runs);
        if (rule->counts_on_gpu)
            take_numbers(t, own);
        span.factors = s.factor ? factors : NULL;
        span.parameter = (uint32_t)(t - tensors);
        of_kernel_find(rule->name, rule->rounds ? OF_REF_CPU_FUSED : OF_REF_CUDA_OP_BY_OP, dtype,
                       OF_CPU, OF_ISA_C)
            ->run(&span, own);
        return;
    }
    of_kernel_find(update.rule, OF_REF_CUDA_FUSED, dtype, OF_CPU, OF_ISA_C)->run(&span, &s);
}

// Whether the bytes beside an array are as they were.
static bool intact(const unsigned char *device, size_t offset, size_t bytes) {
    unsigned char after[PADDING];
    GPU(cudaMemcpy(after, device + offset + bytes, 64, cudaMemcpyDeviceToHost));
    GPU(cudaMemcpy(after + 64, device, offset, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < 64 + offset; i++)
        if (after[i] != 0xa5)
            return false;
    return true;
}

static size_t differing(tensor *t) {
    size_t element, outside = 0;
    int array;
    for (int i = 0; i < N_ARRAYS; i++) {
        const size_t bytes = t->mine.n * of_dtype_size(arrays_dtype(&t->mine, i));
        if (!t->mine.at[i])
            continue;
        GPU(cudaMemcpy(t->mine.at[i], t->device[i] + t->offset[i], bytes, cudaMemcpyDeviceToHost));
        outside += !intact(t->device[i], t->offset[i], bytes);
    }
    return outside + arrays_differ(&t->mine, &t->wanted, &array, &element);
}

// A launch after of_cuda_prepare() has nothing left to load, which it must not in a capture.
static void check_prepared(const of_gpu_update &update) {
    of_cuda_status status = of_cuda_prepare(&update);
    if (status == OF_CUDA_OK)
        status = of_cuda_check_loaded(&update);
    if (status == OF_CUDA_OK || status == OF_CUDA_UNSUPPORTED)
        return;
    fprintf(stderr, "%s after of_cuda_prepare(): %s\n", update.rule, of_cuda_error());
    exit(2);
}

static size_t check_round(const of_rule *rule, of_dtype dtype, bool mixed, int major,
                          uint64_t *random) {
    of_cuda_scalars s = {};
    of_gpu_entry entries[TENSORS];
    random_options(rule, s.hyper, random);
    const float lr = 0.25f, scale = 1024.0f, infinite = 0.0f;
    const float factor = dtype == OF_FLOAT64 ? 0.0f : 0.3f;
    const double wide = dtype == OF_FLOAT64 ? 1.0 / 3.0 : (double)factor;
    const float scalars[SCALARS] = {lr, scale, infinite, factor};
    GPU(cudaMemcpy(device_factor, &wide, sizeof wide, cudaMemcpyHostToDevice));
    GPU(cudaMemcpy(device_scalars, scalars, sizeof scalars, cudaMemcpyHostToDevice));
    const bool lr_there = random_next(random) % 2, scaled = random_next(random) % 2;
    s.lr = lr_there ? (double)lr : s.hyper[0];
    s.grad_scale = scale;
    s.factor = random_next(random) % 2 ? &wide : NULL;
    s.early = of_cuda_early(major, dtype);
    of_gpu_update update = {};
    update.rule = mixed ? of_rule_mixed(rule) : rule->name;
    update.dtype = dtype;
    update.hyper = s.hyper;
    update.chunk = (uint32_t[]){0, 64, 1024, 8192}[random_next(random) % 4];
    update.lr_at = lr_there ? device_scalars : NULL;
    update.grad_scale_at = scaled ? device_scalars + 1 : NULL;
    update.found_inf_at = random_next(random) % 2 ? device_scalars + 2 : NULL;
    if (s.factor)
        update.factor_at = dtype == OF_FLOAT64 ? (void *)device_factor : device_scalars + 3;
    update.wide_state = rule->rounds && of_dtype_size(dtype) == 2 && random_next(random) % 2;
    if (rule->prepare_gpu)
        prepare(rule, &update, random);
    if (rule->runs_programs)
        take_program(&update, random);
    check_prepared(update);
    for (size_t i = 0; i < TENSORS; i++) {
        entries[i] =
            upload(&tensors[i], rule, update, mixed, state_used(rule, s.hyper), i, random);
        if (rule->counts_on_gpu)
            upload_numbers(&tensors[i], &entries[i], i, random);
    }
    if (of_cuda_launch(&update, entries, TENSORS) != OF_CUDA_OK) {
        fprintf(stderr, "%s\n", of_cuda_error());
        exit(2);
    }
    GPU(cudaDeviceSynchronize());
    size_t count = 0;
    for (size_t i = 0; i < TENSORS; i++) {
        expect(&tensors[i], rule, update, s, scaled);
        count += differing(&tensors[i]);
        count += rule->counts_on_gpu && numbers_differ(&tensors[i]);
    }
    return count;
}

static bool is_for_gpus(const of_rule *rule, int dtype) {
    if (rule->rounds)
        return rule->prepare_gpu && dtype != OF_FLOAT64;
    return rule->prepare_gpu || rule->runs_programs ||
           of_kernel_find(rule->name, OF_REF_CUDA_FUSED, OF_FLOAT32, OF_CPU, OF_ISA_C) != NULL;
}

static int check_kernels(const of_rule *rule, of_dtype dtype, bool mixed, uint64_t random,
                         int rounds, int major) {
    int bad = 0;
    for (int i = 0; i < rounds; i++)
        bad += check_round(rule, dtype, mixed, major, &random) != 0;
    printf("%-4s %s %s: %d of %d launches differ from the plain C row\n", bad ? "FAIL" : "ok",
           mixed ? of_rule_mixed(rule) : rule->name, of_dtype_name(dtype), bad, rounds);
    return bad;
}

static int check_all(uint64_t seed, int rounds, int major) {
    int failed = 0;
    for (const of_rule *rule = of_rules; rule->name; rule++) {
        for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++)
            if (is_for_gpus(rule, dtype))
                failed += check_kernels(rule, (of_dtype)dtype, false, seed, rounds, major);
        if (of_rule_mixed(rule))
            failed += check_kernels(rule, OF_FLOAT32, true, seed, rounds, major);
    }
    return failed;
}

int main(int argc, char **argv) {
    uint64_t seed = 1;
    int rounds = 12; // a minute holds them
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--seed") == 0)
            seed = strtoull(argv[i + 1], NULL, 0) | 1;
        else if (strcmp(argv[i], "--rounds") == 0)
            rounds = atoi(argv[i + 1]);
    }
    setvbuf(stdout, NULL, _IOLBF, 0); // who is ended at its time limit leaves what it found
    const int major = gpu_open().major;
    for (size_t i = 0; i < TENSORS; i++) {
        arrays_create(&tensors[i].mine, MOST * sizeof(double));
        arrays_create(&tensors[i].wanted, MOST * sizeof(double));
        for (int k = 0; k < N_ARRAYS; k++)
            GPU(cudaMalloc(&tensors[i].device[k], MOST * sizeof(double) + PADDING));
        GPU(cudaMalloc(&tensors[i].numbers_at, 2 * sizeof tensors[i].numbers));
    }
    GPU(cudaMalloc(&device_corrections, 2 * sizeof(double)));
    GPU(cudaMalloc(&device_scalars, (SCALARS + TENSORS) * sizeof(float)));
    GPU(cudaMalloc(&device_factor, sizeof(double)));
    const int failed = check_all(seed, rounds, major) + check_packing(seed, rounds);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
