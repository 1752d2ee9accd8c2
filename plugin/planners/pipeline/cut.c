/* SPDX-License-Identifier: BSD-3-Clause */
/* cut.c: the exact min-max cut of a row of layers into stages, by dynamic programming
 * over how many processes the first layers take. */
#include "planners/pipeline/cut.h"

#include <math.h>
#include <stdlib.h>

#include "fail.h"

/* The best way to have the first layers on so many processes: its last stage. */
typedef struct cell {
    double worst;
    size_t from;     /* the first layer of that stage */
    size_t replicas; /* of it; 0: the last process is not used */
} cell;

typedef struct table {
    const of_stage_loads *loads;
    size_t processes;
    cell *cells; /* (processes + 1) rows of n + 1: the first layers */
} table;

static cell *at(const table *t, size_t processes, size_t layers) {
    return &t->cells[processes * (t->loads->n + 1) + layers];
}

static void try_stage(const table *t, size_t processes, size_t to, size_t from, size_t r) {
    const double before = at(t, processes - r, from)->worst;
    const double worst = of_later(before, t->loads->load(t->loads->of, from, to, r));
    cell *best = at(t, processes, to);
    if (worst < best->worst)
        *best = (cell){.worst = worst, .from = from, .replicas = r};
}

static void fill_cell(const table *t, size_t processes, size_t to) {
    *at(t, processes, to) = (cell){.worst = to ? INFINITY : 0};
    if (!processes)
        return;
    at(t, processes, to)->worst = at(t, processes - 1, to)->worst;
    for (size_t r = 1; r <= processes && r <= t->loads->most_replicas; r++)
        for (size_t from = to; from-- > 0;)
            try_stage(t, processes, to, from, r);
}

/* From the last stage to the first; then turned round. */
static size_t read_back(const table *t, of_stage *stages) {
    size_t n = 0, processes = t->processes, to = t->loads->n;
    while (to) {
        const cell *last = at(t, processes, to);
        if (last->replicas) {
            stages[n++] = (of_stage){.from = last->from, .to = to, .replicas = last->replicas};
            to = last->from;
        }
        processes -= last->replicas ? last->replicas : 1;
    }
    for (size_t i = 0; i < n / 2; i++) {
        const of_stage swapped = stages[i];
        stages[i] = stages[n - 1 - i];
        stages[n - 1 - i] = swapped;
    }
    for (size_t i = 1; i < n; i++)
        stages[i].process = stages[i - 1].process + stages[i - 1].replicas;
    return n;
}

of_status of_cut_stages(const of_stage_loads *loads, size_t processes, of_stage *stages,
                        size_t *n_stages, double *largest) {
    if (loads->most_replicas == 1 && processes > loads->n)
        processes = loads->n; /* no stage is empty */
    table t = {.loads = loads, .processes = processes};
    if (processes < SIZE_MAX / sizeof *t.cells / (loads->n + 1) - 1)
        t.cells = calloc((processes + 1) * (loads->n + 1), sizeof *t.cells);
    if (!t.cells)
        return of_fail(OF_NO_MEMORY, "out of memory for a cut of %zu layers into %zu stages",
                       loads->n, processes);
    for (size_t used = 0; used <= processes; used++)
        for (size_t to = 0; to <= loads->n; to++)
            fill_cell(&t, used, to);
    *n_stages = read_back(&t, stages);
    if (largest)
        *largest = at(&t, processes, loads->n)->worst;
    free(t.cells);
    return OF_OK;
}
