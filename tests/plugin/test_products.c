/* SPDX-License-Identifier: BSD-3-Clause */
/* Updates whose gradient is a product that nobody has computed: panel by panel of its rows, with
 * the bits of an update of the whole; or from memory, once somebody has computed it. */
#include <stdlib.h>

#include "fixture.h"

#define WORDS "a panel of a gradient could not be computed: these panels fail"

/* The gradient of a twin, which in memory is something else. */
typedef struct product {
    unsigned char *values;
    fake_buffer *gradient;
    int64_t row_bytes;
    bool is_made;
    bool fails; /* its panels can't be computed */
    atomic_int begun, ended, panels;
    atomic_bool overlaps; /* a panel was asked for that is none of those that were agreed on */
    int64_t rows, panel_rows;
} product;

static const void *begin(const void *key, const void **grad) {
    product *p = (product *)(uintptr_t)key;
    if (p->is_made) {
        *grad = p->gradient->data;
        return NULL;
    }
    p->begun++;
    return p;
}

static const void *rows(const void *opaque, int64_t first, int64_t end) {
    product *p = (product *)(uintptr_t)opaque;
    static _Thread_local _Alignas(64) unsigned char panel[1 << 16];
    const size_t bytes = (size_t)((end - first) * p->row_bytes);
    const bool is_last = end == p->rows;
    if (first % p->panel_rows != 0 || (!is_last && end - first != p->panel_rows))
        p->overlaps = true;
    p->panels++;
    ck_assert_uint_le(bytes, sizeof panel);
    memcpy(panel, p->values + first * p->row_bytes, bytes);
    if (p->fails)
        of_set_error("these panels fail");
    return p->fails ? NULL : panel;
}

static void end(const void *opaque) {
    ((product *)(uintptr_t)opaque)->ended++;
}

static const of_product_host products = {sizeof products, begin, rows, end};

static fixture *promising(of_mode mode) {
    fake_host *host = fake_host_new();
    host->table.product = &products;
    return setup_with(host, mode, 0);
}

/* The gradient is what the twin's yardstick has been updated from, as a product of so many rows. */
static product *promise(twin *t, int64_t n_rows, int64_t panel_rows) {
    product *p = calloc(1, sizeof *p);
    p->gradient = t->tensor->grad;
    p->values = malloc(p->gradient->bytes);
    p->rows = t->tensor->rows = n_rows;
    p->panel_rows = t->tensor->panel_rows = panel_rows;
    p->row_bytes = (int64_t)p->gradient->bytes / n_rows;
    memcpy(p->values, p->gradient->data, p->gradient->bytes);
    memset(p->gradient->data, 0x3f, p->gradient->bytes);
    t->tensor->product = p;
    return p;
}

static product *promise_expected(fixture *f, twin *t, int64_t n_rows, int64_t panel_rows) {
    backward(t);
    expect_update(f, t);
    return promise(t, n_rows, panel_rows);
}

static void forget(twin *t, product *p) {
    ck_assert_int_eq(p->begun, p->ended);
    ck_assert(!p->overlaps);
    t->tensor->product = NULL;
    free(p->values);
    free(p);
}

#define PROMISING(name, mode, end) WITH(name, promising(mode), end)

PROMISING(a_use_computes_it_panel_by_panel, OF_FORWARD, teardown) {
    static const struct {
        int64_t rows, columns, panel_rows, panels;
    } shapes[] = {{100, 30, 32, 4}, {64, 48, 32, 2}, {5, 7, 16, 1}, {33, 129, 32, 2}, {96, 1, 96, 1}};
    for (size_t i = 0; i < LENGTH(shapes); i++) {
        twin *t = add(f, shapes[i].rows * shapes[i].columns);
        product *p = promise_expected(f, t, shapes[i].rows, shapes[i].panel_rows);
        step_only(f);
        ck_assert(!launched(t) && p->panels == 0);
        check_twin(t);
        ck_assert_int_eq(p->panels, shapes[i].panels);
        forget(t, p);
        fake_set_grad(t->tensor, NULL);
    }
}

PROMISING(what_somebody_has_computed_is_read_from_memory, OF_FORWARD, teardown) {
    twin *t = add(f, 96 * 50);
    product *p = promise_expected(f, t, 96, 32);
    step_only(f);
    memcpy(p->gradient->data, p->values, p->gradient->bytes);
    p->is_made = true;
    check_twin(t);
    ck_assert_int_eq(p->begun, 0);
    forget(t, p);
}

PROMISING(neighbours_run_along, OF_BACKWARD, teardown) {
    twin *small = add(f, 100), *t = add(f, 320 * 64);
    gradient(f, small);
    product *p = promise_expected(f, t, 320, 32);
    OK(ready(f, t->slot));
    ck_assert(launched(small) && launched(t));
    ck_assert_int_eq(p->panels, 10);
    OK(end_pass(f));
    step_only(f);
    forget(t, p);
}

/* In step(), and at a use. */
TESTS(a_panel_that_fails_is_told, 2) {
    const bool in_step = row == 0;
    fixture *f = promising(OF_FORWARD);
    twin *t = in_step ? add_eager(f, 96 * 50) : add(f, 96 * 50);
    product *p = promise_expected(f, t, 96, 32);
    p->fails = true;
    if (in_step) {
        FAILS(OF_REFUSED, of_plan_step(f->plan, NULL, 0, NULL), WORDS);
    } else {
        step_only(f);
        FAILS(OF_ACCESS_FAILED, of_access(t->tensor->param, false), WORDS);
    }
    teardown_unchecked(f);
    free(p->values);
    free(p);
}

/* Panels that would cut a cache line; rows that are none; a host without the table. */
TESTS(bad_shapes_are_refused, 5) {
    static const int64_t shapes[][2] = {{96, 1}, {7, 32}, {0, 32}, {96, 0}, {96, 32}};
    fixture *f = row < 4 ? promising(OF_FORWARD) : setup(OF_FORWARD, 0);
    twin *t = add(f, 96 * 50);
    backward(t);
    product p = {0};
    t->tensor->product = &p;
    t->tensor->rows = shapes[row][0];
    t->tensor->panel_rows = shapes[row][1];
    INVALID(of_plan_step(f->plan, NULL, 0, NULL), row < 4 ? "a product of" : "");
    teardown_unchecked(f);
}
