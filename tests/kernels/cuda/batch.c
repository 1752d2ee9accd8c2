/* SPDX-License-Identifier: BSD-3-Clause */
#include "batch.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/table.h"
#include "rules/asgd_foreach.h"

#define powf batch_powf
#include "rules/asgd_next.h"
#undef powf

float (*batch_powf)(float x, float exponent) = powf;
double (*batch_pow)(double x, double exponent) = pow;

void batch_create(batch *b, size_t most, size_t longest) {
    memset(b, 0, sizeof *b);
    b->most = most;
    b->longest = longest;
    b->tensors = calloc(most, sizeof *b->tensors);
    b->entries = calloc(most, sizeof *b->entries);
    if (!b->tensors || !b->entries) {
        perror("batch");
        exit(2);
    }
    for (size_t i = 0; i < most; i++) {
        const size_t bytes = sizeof(double) * (i < LONG_TENSORS ? longest : SHORT_LENGTH);
        arrays_create(&b->tensors[i].mine, bytes);
        arrays_create(&b->tensors[i].wanted, bytes);
    }
}

void batch_destroy(batch *b) {
    for (size_t i = 0; i < b->most; i++) {
        arrays_destroy(&b->tensors[i].mine);
        arrays_destroy(&b->tensors[i].wanted);
    }
    free(b->tensors);
    free(b->entries);
}

static double pick(uint64_t *random, const double *values, size_t n) {
    return values[random_next(random) % n];
}

float near_halves(of_dtype dtype, uint64_t *random) {
    const uint64_t ones = (uint64_t)1 << (dtype == OF_FLOAT16 ? 11 : 8); /* digits of a number */
    const uint64_t number = ones / 2 + random_next(random) % (ones / 2);
    const uint64_t middle = (ones + random_next(random) % ones) | 1;
    return (float)((double)middle / (double)(2 * number));
}

/* Mostly any, so that its powers have many digits. */
static double random_beta(uint64_t *random) {
    static const double betas[] = {0.0, 0.5, 0.9, 0.999};
    return random_next(random) % 4 ? 1 - ldexp(random_real(random), -(int)(random_next(random) % 10))
                                   : pick(random, betas, 4);
}

static double random_hyper(const char *name, uint64_t *random) {
    static const double betas[] = {0.0, 0.5, 0.9, 0.999}, weights[] = {0.0, 0.01, 0.3};
    static const double rates[] = {1e-3, 0.1, 7.0}, eps[] = {0.0, 1e-8, 1e-3};
    static const char *const flags[] = {"amsgrad",  "maximize", "decoupled",
                                        "nesterov", "centered", "decoupled_weight_decay",
                                        "stochastic_rounding", "stochastic_state"};
    for (size_t i = 0; i < sizeof flags / sizeof *flags; i++)
        if (strcmp(name, flags[i]) == 0)
            return (double)(random_next(random) & 1);
    if (strncmp(name, "beta", 4) == 0)
        return random_beta(random);
    if (strcmp(name, "momentum") == 0 || strcmp(name, "dampening") == 0 ||
        strcmp(name, "alpha") == 0 || strcmp(name, "rho") == 0)
        return pick(random, betas, 4);
    if (strcmp(name, "weight_decay") == 0)
        return pick(random, weights, 3);
    if (strcmp(name, "seed") == 0)
        return (double)(random_next(random) >> 11);
    return strcmp(name, "eps") == 0 ? pick(random, eps, 3) : pick(random, rates, 3);
}

/* Often at the edge of a chunk, of a vector, or empty. */
static size_t random_length(size_t longest, uint64_t *random) {
    if (longest == SHORT_LENGTH)
        return random_next(random) % SHORT_LENGTH;
    const uint64_t kind = random_next(random);
    const size_t chunk = kind >> 16 & 1 ? 4096 : 1024;
    switch (kind % 4) {
    case 0:
        return chunk * (1 + random_next(random) % 4) - 3 + random_next(random) % 7;
    case 1:
        return random_next(random) % longest;
    case 2:
        return random_next(random) % 100 * 4;
    default:
        return random_next(random) % 40;
    }
}

/* ASGD's, which are where the step is. */
static void fill_numbers(batch *b, size_t i, uint64_t *random) {
    static const double etas[] = {0.01, 0.3, 1e-6, 2.0}, mus[] = {1.0, 0.5, 1.0 / 3.0, 1e-5};
    batch_tensor *t = &b->tensors[i];
    of_gpu_entry *entry = &b->entries[i];
    t->numbers[asgd_eta] = (float)pick(random, etas, 4);
    t->numbers[asgd_mu] = (float)pick(random, mus, 4);
    memcpy(t->wanted_numbers, t->numbers, sizeof t->numbers);
    t->step_on_device = true;
    entry->step_at = &t->step_before;
    for (int k = 0; k < ASGD_N_COUNTERS; k++)
        entry->numbers_at[k] = &t->numbers[k];
}

/* Gradients that make averages halfway between two bfloat16, or next to that: with betas of 0 the
 * averages are the gradient and its square. */
static void fill_halves(arrays *a, uint64_t *random) {
    static const uint32_t ends[] = {0x8000, 0x7fff, 0x8001, 0x0000};
    for (size_t k = 0; k < a->n; k++) {
        uint32_t bits;
        memcpy(&bits, a->at[1] + k * sizeof bits, sizeof bits);
        if (random_next(random) % 4 == 0)
            bits = (bits & 0xffff0000u) | ends[random_next(random) % 4];
        memcpy(a->at[1] + k * sizeof bits, &bits, sizeof bits);
    }
}

static void fill_tensor(batch *b, size_t i, unsigned used, uint64_t *random) {
    static const double steps[] = {1, 2, 100, 100000};
    batch_tensor *t = &b->tensors[i];
    of_gpu_entry *entry = &b->entries[i];
    const of_dtype dtype = b->update.dtype;
    const size_t longest = i < LONG_TENSORS ? b->longest : SHORT_LENGTH;
    const size_t n = random_length(longest, random) % (longest + 1);
    static const size_t alignments[] = {16, 16, 8, 1};
    t->mine.mixed = t->wanted.mixed = b->mixed;
    t->mine.wide = t->wanted.wide = b->update.wide_state;
    arrays_place_aligned(&t->mine, dtype, n, used, alignments[random_next(random) % 4], random);
    arrays_place(&t->wanted, dtype, n, used, random);
    arrays_fill(&t->wanted, random);
    if (b->mixed)
        fill_halves(&t->wanted, random);
    arrays_copy(&t->mine, &t->wanted);
    t->step = random_next(random) % 2 ? (float)pick(random, steps, 4)
                                      : (float)(1 + random_next(random) % 2000);
    t->step_before = t->step - 1.0f;
    /* Seldom another than the last one: each change takes a launch. */
    t->step_on_device = i ? b->tensors[i - 1].step_on_device : random_next(random) & 1;
    if (random_next(random) % 1000 == 0 || (b->n < LONG_TENSORS && random_next(random) % 8 == 0))
        t->step_on_device = !t->step_on_device;
    t->step_on_device = t->step_on_device && !b->rule->rounds;
    *entry = (of_gpu_entry){.param = t->mine.at[0],
                             .grad = t->mine.at[1],
                             .n = n,
                             .step_at = t->step_on_device ? &t->step_before : NULL,
                             .step = t->step_on_device ? NAN : t->step,
                             .parameter = (uint32_t)random_next(random) >> 8};
    for (int k = 0; k < OF_MAX_STATE; k++)
        entry->state[k] = t->mine.at[2 + k];
    if (n == 0 && random_next(random) & 1)
        entry->param = NULL; /* as empty tensors have it */
}

/* Then there are no scalars on the device. */
static void prepare(batch *b, uint64_t *random) {
    static const double steps[] = {1, 2, 3, 10, 100, 100000}, counters[] = {1.0, 0.9, 0.01};
    of_count count = {.step = pick(random, steps, 6)};
    for (int i = 0; i < OF_MAX_COUNTERS; i++)
        count.counters[i] = pick(random, counters, 3);
    memset(b->prepared, 0, sizeof b->prepared);
    b->rule->prepare_gpu(b->hyper, &count, b->prepared);
    b->update.hyper = b->prepared;
    b->update.lr_at = b->update.grad_scale_at = b->update.found_inf_at = NULL;
}

static unsigned state_used(const batch *b) {
    if (b->rule->runs_programs)
        return (b->program.reads | b->program.writes) >> OF_REGISTER_STATE;
    return b->rule->state_used(b->hyper);
}

static void take_program(batch *b, uint64_t *random) {
    b->program = random_program(b->code, false, OF_CUDA_REGISTERS, random);
    b->update.program = &b->program;
    b->update.lr_at = b->update.grad_scale_at = b->update.found_inf_at = NULL;
}

void batch_fill(batch *b, const of_rule *rule, of_dtype dtype, bool many, uint64_t *random) {
    b->rule = rule;
    for (size_t i = 0; i < rule->n_hyper; i++)
        b->hyper[i] = random_hyper(rule->hyper[i], random);
    if (b->mixed && random_next(random) % 4 == 0)
        b->hyper[1] = b->hyper[2] = 0; /* beta1, beta2: for fill_halves() */
    b->lr = (float)pick(random, (double[]){1e-3, 0.25}, 2);
    b->grad_scale = (float)pick(random, (double[]){1024.0, 3.0}, 2);
    b->found_inf = random_next(random) % 8 == 0 ? 1.0f : 0.0f;
    b->factor = (float)pick(random, (double[]){0.3, 1.0, 1e-4}, 3);
    if (random_next(random) % 2)
        b->factor = near_halves(dtype, random);
    b->wide_factor = dtype == OF_FLOAT64 ? 1.0 / 3.0 : (double)b->factor;
    b->update = (of_gpu_update){.rule = b->mixed ? of_rule_mixed(rule) : rule->name,
                                 .dtype = dtype,
                                 .hyper = b->hyper,
                                 .lr_at = random_next(random) % 2 ? &b->lr : NULL,
                                 .grad_scale_at = random_next(random) % 2 ? &b->grad_scale : NULL,
                                 .found_inf_at = random_next(random) % 2 ? &b->found_inf : NULL};
    if (random_next(random) % 2)
        b->update.factor_at =
            dtype == OF_FLOAT64 ? (const void *)&b->wide_factor : (const void *)&b->factor;
    b->update.wide_state = rule->rounds && of_dtype_size(dtype) == 2 && random_next(random) % 2;
    if (rule->rounds && random_next(random) % 2) /* blocks begin within chunks of draws */
        b->update.chunk = OF_CUDA_CHUNK_UNIT;
    if (rule->prepare_gpu)
        prepare(b, random);
    if (rule->runs_programs)
        take_program(b, random);
    b->n = many ? b->most : random_next(random) % (b->most < LONG_TENSORS ? b->most : LONG_TENSORS);
    for (size_t i = 0; i < b->n; i++) {
        fill_tensor(b, i, state_used(b), random);
        if (rule->counts_on_gpu)
            fill_numbers(b, i, random);
    }
}

/* As the kernels compute it; where the state is bfloat16, in double. */
static double correction(of_dtype dtype, double beta, float step) {
    if (dtype == OF_FLOAT64)
        return 1.0 - batch_pow(beta, (double)step);
    return (double)(1.0f - batch_powf((float)beta, step));
}

static double square_root(of_dtype dtype, double x) {
    return dtype == OF_FLOAT64 ? sqrt(x) : (double)sqrtf((float)x);
}

static bool is_at_a_four(const void *array, of_dtype dtype) {
    return (uintptr_t)array % (4 * of_dtype_size(dtype)) == 0;
}

/* Whether PyTorch would take the tensor in fours. */
static bool in_fours(const of_gpu_entry *entry, const arrays *of, unsigned used) {
    bool all = entry->n % 4 == 0 && is_at_a_four(entry->param, of->dtype) &&
               is_at_a_four(entry->grad, of->dtype);
    for (unsigned i = 0; i < OF_MAX_STATE; i++)
        if (used & (1u << i))
            all = all && is_at_a_four(entry->state[i], arrays_dtype(of, (int)i + 2));
    return all;
}

/* The prepared scalars with the tensor's own numbers, which are then renewed. */
static void take_numbers(const batch *b, batch_tensor *t, double *prepared) {
    asgd_foreach_scalars s;
    memcpy(&s, prepared, sizeof s);
    s.eta = (double)t->wanted_numbers[asgd_eta];
    s.mu = (double)t->wanted_numbers[asgd_mu];
    memcpy(prepared, &s, sizeof s);
    const asgd_schedule of = {b->hyper[asgd_lr], b->hyper[asgd_lambd] * b->hyper[asgd_lr],
                             b->hyper[asgd_alpha], b->hyper[asgd_t0]};
    t->wanted_numbers[asgd_eta] = asgd_next_eta(&of, t->step);
    t->wanted_numbers[asgd_mu] = asgd_next_mu(&of, t->step);
}

static void expect_tensor(batch *b, size_t i) {
    batch_tensor *t = &b->tensors[i];
    const of_dtype dtype = b->update.dtype;
    const unsigned used = state_used(b);
    const size_t tail = in_fours(&b->entries[i], &t->mine, used) ? 0 : b->entries[i].n;
    of_span span = arrays_span(&t->wanted, tail);
    if (b->rule->prepare_gpu || b->rule->runs_programs) {
        const double factors[] = {b->wide_factor, 1.0};
        double prepared[OF_MAX_HYPER];
        const of_program *program = &b->program;
        memcpy(prepared, b->prepared, sizeof prepared);
        if (b->rule->runs_programs)
            memcpy(prepared, &program, sizeof program);
        if (b->rule->counts_on_gpu)
            take_numbers(b, t, prepared);
        span.factors = b->update.factor_at ? factors : NULL;
        span.parameter = b->entries[i].parameter;
        of_kernel_find(b->rule->name, b->rule->rounds ? OF_REF_CPU_FUSED : OF_REF_CUDA_OP_BY_OP,
                       dtype, OF_CPU, OF_ISA_C)
            ->run(&span, prepared);
        return;
    }
    of_cuda_scalars s = {.lr = b->update.lr_at ? (double)b->lr : b->hyper[0],
                         .factor = b->update.factor_at ? &b->wide_factor : NULL,
                         .grad_scale = b->grad_scale,
                         .unscaled = b->update.grad_scale_at ? t->wanted.at[1] : NULL,
                         .first = t->step <= 1.0f,
                         .early = b->early};
    memcpy(s.hyper, b->hyper, sizeof s.hyper);
    const of_dtype corrected = b->mixed ? OF_FLOAT64 : dtype;
    s.correction1 = correction(corrected, b->hyper[1], t->step);
    s.correction2 = square_root(corrected, correction(corrected, b->hyper[2], t->step));
    of_kernel_find(b->update.rule, OF_REF_CUDA_FUSED, dtype, OF_CPU, OF_ISA_C)->run(&span, &s);
}

void batch_expect(batch *b) {
    const bool skipped = b->update.found_inf_at && b->found_inf == 1.0f;
    for (size_t i = 0; i < b->n && !skipped; i++)
        expect_tensor(b, i);
}

static bool numbers_differ(const batch *b, size_t i, bool report) {
    const batch_tensor *t = &b->tensors[i];
    const float *have = t->numbers, *want = t->wanted_numbers;
    if (!b->rule->counts_on_gpu || memcmp(have, want, sizeof t->numbers) == 0)
        return false;
    if (report)
        printf("  tensor %zu: eta %.9g, mu %.9g, not %.9g, %.9g\n", i, (double)have[asgd_eta],
               (double)have[asgd_mu], (double)want[asgd_eta], (double)want[asgd_mu]);
    return true;
}

size_t batch_differ(const batch *b, bool report) {
    size_t count = 0;
    for (size_t i = 0; i < b->n; i++) {
        const batch_tensor *t = &b->tensors[i];
        int array = 0;
        size_t element = 0, bad = arrays_differ(&t->mine, &t->wanted, &array, &element);
        if (bad && report && !count)
            printf("  tensor %zu of %zu, %zu elements: %zu differ, the first: array %d [%zu]\n", i,
                   b->n, t->mine.n, bad, array, element);
        bad += numbers_differ(b, i, report);
        if (!arrays_intact(&t->mine)) {
            bad++;
            if (report)
                printf("  tensor %zu: wrote outside of the arrays\n", i);
        }
        count += bad;
    }
    return count;
}
