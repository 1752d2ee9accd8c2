/* SPDX-License-Identifier: BSD-3-Clause */
#define _DEFAULT_SOURCE
#include "arrays.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cpu/narrow.h"

enum { PATTERN = 0xa5, MARGIN = 128 };

uint64_t random_next(uint64_t *state) {
    uint64_t x = *state; /* xorshift64* */
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    return x * 0x2545f4914f6cdd1dull;
}

double random_real(uint64_t *state) {
    return (double)(random_next(state) >> 11) * 0x1p-53;
}

guarded guarded_create(size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    guarded area = {NULL, (bytes + page - 1) / page * page};
    unsigned char *all = mmap(NULL, area.bytes + 2 * page, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || mprotect(all, page, PROT_NONE) ||
        mprotect(all + page + area.bytes, page, PROT_NONE)) {
        perror("guard pages");
        exit(2);
    }
    area.pages = all + page;
    return area;
}

void guarded_destroy(guarded *area) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    munmap(area->pages - page, area->bytes + 2 * page);
    area->pages = NULL;
}

of_dtype arrays_dtype(const arrays *a, int i) {
    if (i < 2)
        return a->dtype;
    return a->mixed ? OF_BFLOAT16 : a->wide ? OF_FLOAT32 : a->dtype;
}

void arrays_create(arrays *a, size_t most_bytes) {
    memset(a, 0, sizeof *a);
    for (int i = 0; i < N_ARRAYS; i++) {
        a->areas[i] = guarded_create(most_bytes + 2 * MARGIN);
        memset(a->areas[i].pages, PATTERN, a->areas[i].bytes);
    }
}

void arrays_destroy(arrays *a) {
    for (int i = 0; i < N_ARRAYS; i++)
        guarded_destroy(&a->areas[i]);
}

/* At the start, at the end, or up to MARGIN bytes from the start. */
static size_t random_offset(size_t room, size_t size, uint64_t *random) {
    switch (random_next(random) % 4) {
    case 0:
        return 0;
    case 1:
        return random_next(random) % (MARGIN / size) * size;
    default:
        return room;
    }
}

void arrays_place(arrays *a, of_dtype dtype, size_t n, unsigned state_used, uint64_t *random) {
    a->dtype = dtype;
    a->n = n;
    for (int i = 0; i < N_ARRAYS; i++) {
        const size_t size = of_dtype_size(arrays_dtype(a, i));
        const bool present = i < 2 || (state_used >> (i - 2) & 1u);
        const size_t room = a->areas[i].bytes - n * size;
        if (a->at[i]) /* the rest of the area holds the pattern already */
            memset(a->at[i], PATTERN, a->placed[i]);
        a->placed[i] = n * size;
        a->at[i] = present ? a->areas[i].pages + random_offset(room, size, random) : NULL;
    }
}

void arrays_place_aligned(arrays *a, of_dtype dtype, size_t n, unsigned state_used,
                          size_t alignment, uint64_t *random) {
    arrays_place(a, dtype, n, state_used, random);
    for (int i = 0; i < N_ARRAYS; i++) {
        const size_t size = of_dtype_size(arrays_dtype(a, i));
        const size_t wanted = alignment * size / of_dtype_size(dtype);
        const size_t step = wanted > size ? wanted : size;
        if (a->at[i])
            a->at[i] = a->areas[i].pages + (a->areas[i].bytes - n * size) / step * step;
    }
    const uint64_t odd = random_next(random) % (4 * N_ARRAYS);
    if (odd < N_ARRAYS && a->at[odd])
        a->at[odd] -= of_dtype_size(arrays_dtype(a, (int)odd));
}

void arrays_put(unsigned char *to, of_dtype dtype, double value) {
    const float single = (float)value;
    const uint16_t narrow =
        dtype == OF_BFLOAT16 ? of_bfloat16_narrow(single) : of_float16_narrow(single);
    if (dtype == OF_FLOAT32)
        memcpy(to, &single, sizeof single);
    else if (dtype == OF_FLOAT64)
        memcpy(to, &value, sizeof value);
    else
        memcpy(to, &narrow, sizeof narrow);
}

double arrays_get(const unsigned char *from, of_dtype dtype) {
    float single = 0;
    double value;
    uint16_t narrow;
    switch (dtype) {
    case OF_FLOAT32:
        memcpy(&single, from, sizeof single);
        return single;
    case OF_FLOAT64:
        memcpy(&value, from, sizeof value);
        return value;
    default:
        memcpy(&narrow, from, sizeof narrow);
        return dtype == OF_BFLOAT16 ? of_bfloat16_widen(narrow) : of_float16_widen(narrow);
    }
}

static double random_value(of_dtype dtype, bool negative, uint64_t *random) {
    static const double denormal[OF_DTYPE_COUNT] = {1e-40, 1e-310, 1e-39, 1e-6};
    static const double special[] = {0.0, -0.0, INFINITY, -INFINITY, NAN, 1e4, 3e38, 1e300};
    const uint64_t kind = random_next(random) % 24;
    double value = random_real(random) * 2.0 - 1.0;
    if (kind < sizeof special / sizeof *special)
        value = special[kind];
    else if (kind < 10)
        value *= denormal[dtype];
    else if (kind < 16)
        value = ldexp(value, (int)(random_next(random) % 40) - 30);
    return negative ? value : fabs(value);
}

void arrays_fill(arrays *a, uint64_t *random) {
    /* Running averages of squares are never negative. */
    static const bool negative[N_ARRAYS] = {true, true, true, false, false};
    for (int i = 0; i < N_ARRAYS; i++) {
        const of_dtype dtype = arrays_dtype(a, i);
        const size_t size = of_dtype_size(dtype);
        for (size_t k = 0; a->at[i] && k < a->n; k++)
            arrays_put(a->at[i] + k * size, dtype, random_value(dtype, negative[i], random));
    }
}

void arrays_copy(arrays *to, const arrays *from) {
    for (int i = 0; i < N_ARRAYS; i++)
        if (from->at[i])
            memcpy(to->at[i], from->at[i], from->n * of_dtype_size(arrays_dtype(from, i)));
}

of_span arrays_span(const arrays *a, size_t tail) {
    of_span span = {.param = a->at[0],
                    .grad = a->at[1],
                    .n = a->n,
                    .tail = tail,
                    .wide_state = a->wide};
    for (int i = 0; i < OF_MAX_STATE; i++)
        span.state[i] = a->at[2 + i];
    return span;
}

bool arrays_same(const unsigned char *x, const unsigned char *y, of_dtype dtype) {
    return memcmp(x, y, of_dtype_size(dtype)) == 0 ||
           (isnan(arrays_get(x, dtype)) && isnan(arrays_get(y, dtype)));
}

size_t arrays_differ(const arrays *a, const arrays *b, int *array, size_t *element) {
    size_t count = 0;
    for (int i = 0; i < N_ARRAYS; i++) {
        const of_dtype dtype = arrays_dtype(a, i);
        const size_t size = of_dtype_size(dtype);
        if (!a->at[i] || memcmp(a->at[i], b->at[i], a->n * size) == 0)
            continue;
        for (size_t k = 0; k < a->n; k++) {
            if (arrays_same(a->at[i] + k * size, b->at[i] + k * size, dtype))
                continue;
            if (count++ == 0) {
                *array = i;
                *element = k;
            }
        }
    }
    return count;
}

/* The first byte is, and each is as the one before: most of a check's time is spent here. */
static bool is_pattern(const unsigned char *from, const unsigned char *to) {
    return from == to || (*from == PATTERN && memcmp(from, from + 1, (size_t)(to - from) - 1) == 0);
}

bool arrays_intact(const arrays *a) {
    for (int i = 0; i < N_ARRAYS; i++) {
        const size_t bytes = a->n * of_dtype_size(arrays_dtype(a, i));
        const unsigned char *begin = a->areas[i].pages, *end = begin + a->areas[i].bytes;
        const unsigned char *at = a->at[i] ? a->at[i] : end;
        if (!is_pattern(begin, at) || !is_pattern(at + (a->at[i] ? bytes : 0), end))
            return false;
    }
    return true;
}
