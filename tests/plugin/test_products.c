/* SPDX-License-Identifier: BSD-3-Clause */
/* Updates whose gradient is a product that nobody has computed: panel by panel of its rows, with
 * the bits of an update of the whole; or from memory, once somebody has computed it. */
#include <stdlib.h>
#include <string.h>

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
    static _Thread_local unsigned char panel[1 << 16];
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

static void step_only(fixture *f) {
    ck_assert_msg(of_plan_step(f->plan, NULL, 0, NULL) == OF_OK, "%s", of_error_message());
}

START_TEST(a_use_computes_it_panel_by_panel) {
    static const struct {
        int64_t rows, columns, panel_rows, panels;
    } shapes[] = {{100, 30, 32, 4}, {64, 48, 32, 2}, {5, 7, 16, 1}, {33, 129, 32, 2}, {96, 1, 96, 1}};
    fixture *f = promising(OF_FORWARD);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        twin *t = add(f, shapes[i].rows * shapes[i].columns);
        product *p = promise_expected(f, t, shapes[i].rows, shapes[i].panel_rows);
        step_only(f);
        ck_assert(!launched(t) && p->panels == 0);
        check_twin(t);
        ck_assert_int_eq(p->panels, shapes[i].panels);
        forget(t, p);
        fake_set_grad(t->tensor, NULL);
    }
    teardown(f);
}
END_TEST

START_TEST(what_somebody_has_computed_is_read_from_memory) {
    fixture *f = promising(OF_FORWARD);
    twin *t = add(f, 96 * 50);
    product *p = promise_expected(f, t, 96, 32);
    step_only(f);
    memcpy(p->gradient->data, p->values, p->gradient->bytes);
    p->is_made = true;
    check_twin(t);
    ck_assert_int_eq(p->begun, 0);
    forget(t, p);
    teardown(f);
}
END_TEST

START_TEST(neighbours_run_along) {
    fixture *f = promising(OF_BACKWARD);
    twin *small = add(f, 100), *t = add(f, 320 * 64);
    backward(small);
    expect_update(f, small);
    ck_assert_int_eq(ready(f, small->slot), OF_OK);
    product *p = promise_expected(f, t, 320, 32);
    ck_assert_msg(ready(f, t->slot) == OF_OK, "%s", of_error_message());
    ck_assert(launched(small) && launched(t));
    ck_assert_int_eq(p->panels, 10);
    ck_assert_int_eq(end_pass(f), OF_OK);
    step_only(f);
    forget(t, p);
    teardown(f);
}
END_TEST

START_TEST(a_plan_says_why_a_panel_failed) {
    fixture *f = promising(OF_FORWARD);
    twin *t = add_eager(f, 96 * 50);
    product *p = promise_expected(f, t, 96, 32);
    p->fails = true;
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_REFUSED);
    ck_assert_ptr_nonnull(strstr(of_error_message(), WORDS));
    teardown_unchecked(f);
    free(p->values);
    free(p);
}
END_TEST

START_TEST(a_use_fails_where_a_panel_does) {
    fixture *f = promising(OF_FORWARD);
    twin *t = add(f, 96 * 50);
    product *p = promise_expected(f, t, 96, 32);
    p->fails = true;
    step_only(f);
    ck_assert_int_eq(of_access(t->tensor->param, false), OF_ACCESS_FAILED);
    ck_assert_ptr_nonnull(strstr(of_error_message(), WORDS));
    teardown_unchecked(f);
    free(p->values);
    free(p);
}
END_TEST

/* Panels that would cut a cache line; rows that are none; a host without the table. */
START_TEST(bad_shapes_are_refused) {
    static const int64_t bad[][2] = {{96, 1}, {7, 32}, {0, 32}, {96, 0}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        fixture *f = promising(OF_FORWARD);
        twin *t = add(f, 96 * 50);
        backward(t);
        product p = {0};
        t->tensor->product = &p;
        t->tensor->rows = bad[i][0];
        t->tensor->panel_rows = bad[i][1];
        ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_INVALID);
        ck_assert_ptr_nonnull(strstr(of_error_message(), "a product of"));
        teardown_unchecked(f);
    }
    fixture *f = setup(OF_FORWARD, 0); /* a host without the table */
    twin *t = add(f, 96 * 50);
    product *p = promise_expected(f, t, 96, 32);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_INVALID);
    forget(t, p);
    teardown_unchecked(f);
}
END_TEST

START_TEST(a_table_with_a_hole_is_refused) {
    static const of_product_host hole = {.struct_size = sizeof hole, .begin = begin, .end = end};
    static const of_product_host small = {8, begin, rows, end};
    fake_host *host = fake_host_new();
    of_plan *plan = NULL;
    host->table.product = &hole;
    ck_assert_int_eq(of_plan_create(&host->table, "adam", NULL, &plan), OF_INVALID);
    host->table.product = &small;
    ck_assert_int_eq(of_plan_create(&host->table, "adam", NULL, &plan), OF_INVALID);
    fake_host_free(host);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("products");
    TCase *tests = tcase_create("products");
    suite_add_tcase(suite, tests);
    tcase_add_test(tests, a_use_computes_it_panel_by_panel);
    tcase_add_test(tests, what_somebody_has_computed_is_read_from_memory);
    tcase_add_test(tests, neighbours_run_along);
    tcase_add_test(tests, a_plan_says_why_a_panel_failed);
    tcase_add_test(tests, a_use_fails_where_a_panel_does);
    tcase_add_test(tests, bad_shapes_are_refused);
    tcase_add_test(tests, a_table_with_a_hole_is_refused);
    return run(suite);
}
