/* SPDX-License-Identifier: BSD-3-Clause */
/* kernel_check: compares every row of the kernel table with the plain C row of
 * the same rule, reference and dtype, bit for bit, on random input between
 * guard pages; with --bench it times each row instead.
 *
 *   kernel_check [--seed N] [--rounds N] [--bench] [--only TEXT]
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arrays.h"
#include "bench.h"
#include "kernels.h"
#include "random_program.h"

enum { MOST_ELEMENTS = 3000 };

typedef struct settings {
    uint64_t seed;
    int rounds;
    bool bench;
    const char *only; /* part of a row's name, or NULL */
} settings;

/* One update to compare: its rule's options, step and the arrays of both rows. */
typedef struct trial {
    double hyper[OF_MAX_HYPER];
    double step, counters[OF_MAX_COUNTERS];
    size_t n, tail;
    bool library; /* square roots are taken as by a library that rounds wrongly */
    bool scaled;  /* the gradient is multiplied first */
    bool past_caches;
    double factors[2];
    uint64_t first; /* of a rule that rounds, and the next two */
    uint32_t parameter;
    bool wide;
    of_instruction code[MOST_INSTRUCTIONS]; /* of a rule that runs programs */
    of_program program;
} trial;

static const char *reference_name(of_reference reference) {
    static const char *const names[OF_REF_COUNT] = {"fused", "plain", "cuda", "cuda op by op"};
    return names[reference];
}

static void row_name(const of_kernel *row, char *name, size_t size) {
    snprintf(name, size, "%s %s %s %s", row->rule, of_dtype_name(row->dtype),
             reference_name(row->reference), of_isa_name(row->isa));
}

static double pick(uint64_t *random, const double *values, size_t n) {
    return values[random_next(random) % n];
}

static bool is_one_of(const char *name, const char *names) {
    const char *found = strstr(names, name);
    const size_t length = strlen(name);
    return found && (found == names || found[-1] == ' ') &&
           (found[length] == ' ' || !found[length]);
}

/* A random value for the option of this name, often the one that switches it
 * off. */
static double random_hyper(const char *name, uint64_t *random) {
    static const double flags[] = {0.0, 1.0};
    static const double betas[] = {0.0, 0.3, 0.5, 0.9, 0.999};
    static const double weights[] = {0.0, 0.0, 0.01, 0.3};
    static const double rates[] = {0.0, 1e-3, 0.1, 7.0};
    static const double eps[] = {0.0, 1e-8, 1e-3};
    if (is_one_of(name, "amsgrad maximize decoupled nesterov centered decoupled_weight_decay "
                        "stochastic_rounding stochastic_state"))
        return pick(random, flags, 2);
    if (strncmp(name, "beta", 4) == 0 ||
        is_one_of(name, "momentum dampening alpha rho etaminus"))
        return pick(random, betas, 5);
    if (strcmp(name, "weight_decay") == 0)
        return pick(random, weights, 4);
    if (strcmp(name, "seed") == 0)
        return (double)(random_next(random) >> 11);
    return strcmp(name, "eps") == 0 ? pick(random, eps, 3) : pick(random, rates, 4);
}

static size_t random_length(uint64_t *random) {
    switch (random_next(random) % 8) {
    case 0:
        return random_next(random) % MOST_ELEMENTS;
    case 1:
        return random_next(random) % 600;
    default:
        return random_next(random) % 100;
    }
}

static unsigned used_by(const of_rule *rule, trial *t) {
    if (!rule->runs_programs)
        return rule->state_used(t->hyper);
    t->program.code = t->code;
    return (t->program.reads | t->program.writes) >> OF_REGISTER_STATE;
}

static trial random_trial(const of_rule *rule, uint64_t *random) {
    static const double steps[] = {1, 2, 3, 100, 100000};
    static const double factors[] = {1.0, 0.3, 1.0 / 65536, 0.0};
    static const double counters[] = {1.0, 0.9, 0.01};
    trial t;
    for (size_t i = 0; i < rule->n_hyper; i++)
        t.hyper[i] = random_hyper(rule->hyper[i], random);
    t.step = pick(random, steps, 5);
    for (int i = 0; i < OF_MAX_COUNTERS; i++)
        t.counters[i] = pick(random, counters, 3);
    t.library = random_next(random) % 2 == 0;
    t.n = random_length(random);
    t.tail = random_next(random) % 16;
    if (t.tail > t.n || random_next(random) % 8 == 0)
        t.tail = t.n;
    t.scaled = random_next(random) % 2 == 0;
    t.past_caches = random_next(random) % 2 == 0;
    t.factors[0] = pick(random, factors, 4);
    t.factors[1] = pick(random, factors, 4);
    t.first = random_next(random) >> (random_next(random) % 2 ? 50 : 20);
    t.parameter = (uint32_t)(random_next(random) % 1000);
    t.wide = rule->rounds && random_next(random) % 2 == 0;
    if (rule->runs_programs)
        t.program = random_program(t.code, t.scaled, OF_REGISTERS, random);
    return t;
}

static void print_trial(const of_rule *rule, const trial *t) {
    printf("  step %g, %zu elements, tail %zu;", t->step, t->n, t->tail);
    for (size_t i = 0; i < rule->n_hyper; i++)
        printf(" %s %g", rule->hyper[i], t->hyper[i]);
    printf(" counters %g %g%s", t->counters[0], t->counters[1], t->library ? " library" : "");
    printf("%s", t->past_caches ? " past the caches" : "");
    if (rule->rounds)
        printf(" first %" PRIu64 " of parameter %u%s", t->first, (unsigned)t->parameter,
               t->wide ? ", float32 state" : "");
    if (t->scaled)
        printf(" factors %g %g", t->factors[0], t->factors[1]);
    for (size_t i = 0; rule->runs_programs && i < t->program.n; i++)
        printf("\n    %d = %d(%d, %d, %d; %g, %g)", t->code[i].to, t->code[i].operation,
               t->code[i].a, t->code[i].b, t->code[i].c, t->code[i].s, t->code[i].t);
    printf("\n");
}

static void roots_of_floats(void *values, size_t n) {
    for (float *x = values; n--; x++)
        *x = nextafterf(sqrtf(*x), 1.0f);
}

static void roots_of_doubles(void *values, size_t n) {
    for (double *x = values; n--; x++)
        *x = nextafter(sqrt(*x), 1.0);
}

static void run(const of_kernel *row, const of_rule *rule, const trial *t, const arrays *a) {
    double scalars[OF_MAX_SCALARS / sizeof(double)];
    of_span span = arrays_span(a, t->tail);
    span.factors = t->scaled ? t->factors : NULL;
    span.past_caches = t->past_caches;
    span.first = t->first;
    span.parameter = t->parameter;
    if (t->library)
        span.square_roots = row->dtype == OF_FLOAT64 ? roots_of_doubles : roots_of_floats;
    of_count count = {.step = t->step, .counters = {t->counters[0], t->counters[1]}};
    const of_program *program = &t->program;
    if (rule->runs_programs)
        memcpy(scalars, &program, sizeof program);
    else
        rule->prepare(t->hyper, &count, scalars);
    row->run(&span, scalars);
}

static const char *array_name(const of_rule *rule, int array) {
    if (array >= 2)
        return rule->state[array - 2];
    return array ? "gradient" : "parameter";
}

/* The number of elements in which two rows differ on one random update. The
 * rows' arrays are placed differently. */
static size_t compare(const of_kernel *row, const of_kernel *with, const of_rule *rule,
                      arrays *mine, arrays *theirs, bool report, uint64_t *random) {
    trial t = random_trial(rule, random);
    const unsigned used = used_by(rule, &t);
    mine->wide = theirs->wide = t.wide && of_dtype_size(row->dtype) == 2;
    if (t.past_caches)
        arrays_place_aligned(mine, row->dtype, t.n, used, 64, random);
    else
        arrays_place(mine, row->dtype, t.n, used, random);
    arrays_place(theirs, row->dtype, t.n, used, random);
    arrays_fill(theirs, random);
    arrays_copy(mine, theirs);
    run(with, rule, &t, theirs);
    run(row, rule, &t, mine);

    int array = 0;
    size_t element = 0, count = arrays_differ(mine, theirs, &array, &element);
    if (count && report)
        printf("  %zu elements differ, the first: %s[%zu]\n", count, array_name(rule, array),
               element);
    if (!arrays_intact(mine) || !arrays_intact(theirs)) {
        printf("  wrote outside of the arrays\n");
        count++;
    }
    if (count && report)
        print_trial(rule, &t);
    return count;
}

static bool check_row(const of_kernel *row, const settings *how, arrays *mine, arrays *theirs) {
    char name[80];
    const of_rule *rule = of_rule_find(row->rule);
    const of_kernel *with =
        of_kernel_find(row->rule, row->reference, row->dtype, row->device, OF_ISA_C);
    uint64_t random = how->seed;
    int bad = 0;
    for (int i = 0; i < how->rounds; i++)
        bad += compare(row, with, rule, mine, theirs, bad < 3, &random) != 0;
    row_name(row, name, sizeof name);
    printf("%-4s %s: %d of %d updates differ from c\n", bad ? "FAIL" : "ok", name, bad,
           how->rounds);
    return bad == 0;
}

/* A check of the checker: the two references do differ. */
static bool sees_differences(const settings *how, arrays *mine, arrays *theirs) {
    const of_kernel *fused = of_kernel_find("adam", OF_REF_CPU_FUSED, OF_FLOAT32, OF_CPU, OF_ISA_C);
    const of_kernel *plain =
        of_kernel_find("adam", OF_REF_CPU_FUSED_PLAIN, OF_FLOAT32, OF_CPU, OF_ISA_C);
    uint64_t random = how->seed;
    size_t count = 0;
    for (int i = 0; i < 20; i++)
        count += compare(fused, plain, of_rule_find("adam"), mine, theirs, false, &random);
    printf("%-4s between the references adam fused and plain %zu elements differ\n",
           count ? "ok" : "FAIL", count);
    return count != 0;
}

static int check_rows(const settings *how, of_isa best) {
    arrays mine, theirs;
    arrays_create(&mine, MOST_ELEMENTS * sizeof(double));
    arrays_create(&theirs, MOST_ELEMENTS * sizeof(double));
    bool skipped[OF_ISA_COUNT] = {false};
    int failed = !sees_differences(how, &mine, &theirs);
    for (const of_kernel *row = of_kernels; row->rule; row++) {
        char name[80];
        row_name(row, name, sizeof name);
        if (row->device != OF_CPU || row->isa == OF_ISA_C ||
            (how->only && !strstr(name, how->only)))
            continue;
        if (row->isa > best)
            skipped[row->isa] = true;
        else
            failed += !check_row(row, how, &mine, &theirs);
    }
    for (int isa = 0; isa < OF_ISA_COUNT; isa++)
        if (skipped[isa])
            printf("skip %s: this CPU lacks it\n", of_isa_name((of_isa)isa));
    arrays_destroy(&mine);
    arrays_destroy(&theirs);
    printf(failed ? "%d rows FAILED\n" : "all rows agree\n", failed);
    return failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

static int bench_rows(const settings *how, of_isa best) {
    bench_header();
    for (const of_kernel *row = of_kernels; row->rule; row++) {
        char name[80];
        row_name(row, name, sizeof name);
        const of_rule *rule = of_rule_find(row->rule); /* NULL: the yardstick of a GPU's alone */
        if (!rule || rule->runs_programs)              /* there is none to time */
            continue;
        if (row->device == OF_CPU && row->isa <= best && (!how->only || strstr(name, how->only)))
            bench_row(row, name);
    }
    return EXIT_SUCCESS;
}

static settings parse(int argc, char **argv) {
    settings how = {1, 300, false, NULL};
    for (int i = 1; i < argc; i++) {
        const bool more = i + 1 < argc;
        if (strcmp(argv[i], "--bench") == 0)
            how.bench = true;
        else if (more && strcmp(argv[i], "--seed") == 0)
            how.seed = strtoull(argv[++i], NULL, 0);
        else if (more && strcmp(argv[i], "--rounds") == 0)
            how.rounds = atoi(argv[++i]);
        else if (more && strcmp(argv[i], "--only") == 0)
            how.only = argv[++i];
        else {
            fprintf(stderr, "usage: %s [--seed N] [--rounds N] [--bench] [--only TEXT]\n", argv[0]);
            exit(2);
        }
    }
    if (how.seed == 0)
        how.seed = 1;
    return how;
}

int main(int argc, char **argv) {
    const settings how = parse(argc, argv);
    const of_isa best = of_isa_detect();
    printf("this CPU runs up to %s; seed %" PRIu64 "\n", of_isa_name(best), how.seed);
    return how.bench ? bench_rows(&how, best) : check_rows(&how, best);
}
