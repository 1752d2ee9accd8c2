/* SPDX-License-Identifier: BSD-3-Clause */
/* mutants_check.c: runs every mutant of one kernel (mutate.py) on inputs that were chosen to reach
 * all of its branches, and says which of them nothing shows.
 *
 *   mutants_check RULE DTYPE LONG
 *
 * Inputs are drawn as device_check draws them, of few and short tensors. From a pool of them those
 * are taken that reach what few before did, and more up to device_check's default rounds. What
 * these do not show is tried on LONG others of longer tensors: few numbers of 16 bits tell how a
 * float32 before them was rounded. A mutant is killed by a bit that differs, or by an error of the
 * machine. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "host_driver.h"
#include "mutant_inputs.h"
#include "mutation.h"

enum { POOL = 1500, ENOUGH = 3, ROUNDS = 40, MOST_LONG = 40 };

ptx_mutation_state ptx_mutation = {.number = -1, .place = -1};

static bool ran; /* the kernel that is mutated */

static void launched(const char *kernel, const void *table, void *stream) {
    (void)table, (void)stream;
    ran = ran || strcmp(kernel, ptx_mutated) == 0;
}

static bool same(const input *in, of_dtype dtype) {
    for (size_t i = 0; i < in->n_areas; i++) {
        const area *a = &in->areas[i];
        if (memcmp(a->at, a->after, a->bytes) == 0)
            continue;
        for (size_t k = 0; k < a->bytes; k += in->element)
            if (!arrays_same(a->at + k, a->after + k, dtype))
                return false;
    }
    return true;
}

/* How often each way of a predicate was reached, then each pair of those that are combined. */
typedef unsigned char counts[PTX_MOST_PLACES][6];

static unsigned ways(int place) {
    return ptx_mutation.reached[place] | (unsigned)ptx_mutation.pairs[place] << 2;
}

/* Whether the input reaches what less than ENOUGH before it did. */
static bool is_new(counts reached) {
    for (int i = 0; i < ptx_n_places; i++)
        for (int way = 0; way < 6; way++)
            if (ways(i) >> way & 1 && reached[i][way] < ENOUGH)
                return true;
    return false;
}

/* Fills the input; whether it runs the kernel. */
static bool drawn(input *in, const char *rule, of_dtype dtype, bool is_long, uint64_t seed) {
    input_fill(in, rule, dtype, is_long, seed * 0x9e3779b97f4a7c15u | 1);
    memset(ptx_mutation.reached, 0, sizeof ptx_mutation.reached);
    memset(ptx_mutation.pairs, 0, sizeof ptx_mutation.pairs);
    ran = false;
    if (!input_run(in))
        abort();
    return ran;
}

static void keep(input *in, counts reached) {
    for (int i = 0; i < ptx_n_places; i++)
        for (int way = 0; way < 6; way++)
            reached[i][way] += ways(i) >> way & 1;
    for (size_t i = 0; i < in->n_areas; i++)
        memcpy(in->areas[i].after, in->areas[i].at, in->areas[i].bytes);
}

/* Those that reach what few did, then others. */
static size_t choose(input *inputs, const char *rule, of_dtype dtype, counts reached) {
    static bool taken[POOL];
    size_t n = 0;
    host.launched = launched;
    for (int others = 0; others < 2; others++)
        for (int seed = 0; seed < POOL && n < ROUNDS; seed++) {
            if (taken[seed])
                continue;
            taken[seed] = drawn(&inputs[n], rule, dtype, false, (uint64_t)seed + 1) &&
                          (is_new(reached) || others);
            if (taken[seed])
                keep(&inputs[n++], reached);
            else
                input_drop(&inputs[n]);
        }
    return n;
}

static size_t add_long(input *inputs, const char *rule, of_dtype dtype, counts reached, size_t n) {
    size_t made = 0;
    for (uint64_t seed = POOL; made < n && seed < 2 * POOL; seed++) {
        if (drawn(&inputs[made], rule, dtype, true, seed))
            keep(&inputs[made++], reached);
        else
            input_drop(&inputs[made]);
    }
    return made;
}

static void report(counts reached, size_t n) {
    int all = 0, seen = 0;
    for (int i = 0; i < ptx_n_places; i++) {
        const bool no = reached[i][0] > 0, yes = reached[i][1] > 0;
        all += no || yes ? 2 : 0;
        seen += no + yes;
        if (no != yes)
            printf("  instruction %d: always %s\n", i, yes ? "true" : "false");
    }
    printf("%s: %zu inputs, %d of %d ways of its predicates reached\n", ptx_mutated, n, seen, all);
}

static bool survives(int number, input *inputs, size_t n, of_dtype dtype) {
    ptx_mutation.number = number;
    ptx_mutation.place = ptx_mutants[number].place;
    for (size_t i = 0; i < n; i++)
        if (!input_run(&inputs[i]) || !same(&inputs[i], dtype))
            return false;
    return true;
}

int main(int argc, char **argv) {
    static input inputs[ROUNDS + MOST_LONG];
    static const char *const kinds[] = {"operand",  "immediate", "predicate",
                                        "rounding", "barrier",   "store"};
    int all[6] = {0}, killed[6] = {0}, dtype = 0;
    if (argc != 4 || atoi(argv[3]) > MOST_LONG)
        return EXIT_FAILURE;
    while (strcmp(of_dtype_name((of_dtype)dtype), argv[2]) != 0)
        dtype++;
    static counts reached;
    size_t n = choose(inputs, argv[1], (of_dtype)dtype, reached);
    n += add_long(&inputs[n], argv[1], (of_dtype)dtype, reached, (size_t)atoi(argv[3]));
    report(reached, n);
    static unsigned char executed[PTX_MOST_PLACES]; /* mutants may go where no kernel does */
    memcpy(executed, ptx_mutation.executed, sizeof executed);
    for (int i = 0; i < ptx_n_mutants; i++) {
        int kind = 0;
        while (strcmp(kinds[kind], ptx_mutants[i].kind) != 0)
            kind++;
        const bool survived = survives(i, inputs, n, (of_dtype)dtype);
        all[kind]++;
        killed[kind] += !survived;
        if (survived)
            printf("%s %d %s: %s\n", executed[ptx_mutants[i].place] ? "survived" : "unreached",
                   ptx_mutants[i].place, kinds[kind], ptx_mutants[i].what);
    }
    for (int kind = 0; kind < 6; kind++)
        printf("total %s %d %d\n", kinds[kind], killed[kind], all[kind]);
    return EXIT_SUCCESS;
}
