/* SPDX-License-Identifier: BSD-3-Clause */
/* placement.c: which process inverts which factor. */
#include <stdlib.h>

#include "fail.h"
#include "planners/kfac/messages.h"

typedef struct factor {
    uint32_t size;
    size_t index;
} factor;

static double cube(uint32_t size) {
    return (double)size * (double)size * (double)size;
}

static int by_index(const factor *x, const factor *y) {
    return (x->index > y->index) - (x->index < y->index);
}

static int larger_first(const void *a, const void *b) {
    const factor *x = a, *y = b;
    return x->size != y->size ? (x->size < y->size) - (x->size > y->size) : by_index(x, y);
}

/* In this order; the caller frees it. NULL if there is no memory. */
static factor *ordered(const uint32_t *sizes, size_t n,
                       int (*compare)(const void *, const void *)) {
    factor *factors = calloc(n + 1, sizeof *factors);
    if (!factors)
        return NULL;
    for (size_t i = 0; i < n; i++)
        factors[i] = (factor){.size = sizes[i], .index = i};
    if (compare)
        qsort(factors, n, sizeof *factors, compare);
    return factors;
}

static size_t least_loaded(const double *load, size_t processes) {
    size_t least = 0;
    for (size_t p = 1; p < processes; p++)
        if (load[p] < load[least])
            least = p;
    return least;
}

static void place(of_placement how, const factor *factors, size_t n, size_t processes,
                  uint32_t everywhere_below, int32_t *owner, double *load) {
    double everywhere = 0;
    size_t turn = 0;
    for (size_t i = 0; i < n; i++) {
        const factor *f = &factors[i];
        if (how == OF_PLACEMENT_EVERYWHERE || f->size < everywhere_below) {
            owner[f->index] = OF_EVERY_PROCESS;
            everywhere += cube(f->size);
            continue;
        }
        const size_t process =
            how == OF_PLACEMENT_BALANCED ? least_loaded(load, processes) : turn++ % processes;
        owner[f->index] = (int32_t)process;
        load[process] += cube(f->size);
    }
    for (size_t p = 0; p < processes; p++)
        load[p] += everywhere;
}

static of_status check_counts(size_t n, size_t processes) {
    if (processes < 1 || processes > INT32_MAX)
        return of_fail(OF_INVALID, "inverses can't be placed on %zu processes: give 1 to %d",
                       processes, INT32_MAX);
    if (n > UINT32_MAX)
        return of_fail(OF_INVALID, "%zu factors are more than can be placed: at most %u", n,
                       (unsigned)UINT32_MAX);
    return OF_OK;
}

of_status of_place_inverses(of_placement how, const uint32_t *sizes, size_t n, size_t processes,
                            uint32_t everywhere_below, int32_t *owner, double *load) {
    if (n && (!sizes || !owner))
        return of_fail(OF_INVALID, "inverses need the sizes of factors and an array for owners");
    if ((unsigned)how > OF_PLACEMENT_EVERYWHERE)
        return of_fail(OF_INVALID, "there is no placement %d of inverses", (int)how);
    const of_status status = check_counts(n, processes);
    if (status != OF_OK)
        return status;
    factor *factors = ordered(sizes, n, how == OF_PLACEMENT_BALANCED ? larger_first : NULL);
    double *loads = calloc(processes, sizeof *loads);
    const bool room = factors && loads;
    if (room)
        place(how, factors, n, processes, everywhere_below, owner, loads);
    for (size_t p = 0; room && load && p < processes; p++)
        load[p] = loads[p];
    free(factors);
    free(loads);
    return room ? OF_OK : of_fail(OF_NO_MEMORY, "out of memory for the inverses of %zu factors", n);
}
