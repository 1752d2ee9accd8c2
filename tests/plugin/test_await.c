/* SPDX-License-Identifier: BSD-3-Clause */
/* Updates whose gradient is still on its way: they are created without it, launched with it, and
 * whoever waits for one gradient holds up nobody who uses another parameter. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

/* A contribution to one gradient. */
typedef struct parcel {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool here;
    bool lost;
    int waiting; /* threads in await() */
    int waits;   /* calls of it that had to wait */
    fake_buffer *gradient;
    unsigned char values[4096];
} parcel;

static bool has_arrived(const void *key) {
    parcel *p = (parcel *)(uintptr_t)key;
    pthread_mutex_lock(&p->lock);
    const bool here = p->here;
    pthread_mutex_unlock(&p->lock);
    return here;
}

static bool await(const void *key) {
    parcel *p = (parcel *)(uintptr_t)key;
    pthread_mutex_lock(&p->lock);
    p->waits += !p->here && !p->lost;
    p->waiting++;
    pthread_cond_broadcast(&p->changed);
    while (!p->here && !p->lost)
        pthread_cond_wait(&p->changed, &p->lock);
    p->waiting--;
    const bool here = p->here;
    pthread_mutex_unlock(&p->lock);
    if (!here)
        of_set_error("the network is gone");
    return here;
}

static const of_await_host arrivals = {sizeof arrivals, has_arrived, await};

static fixture *late(size_t bucket_bytes) {
    fake_host *host = fake_host_new();
    host->table.await = &arrivals;
    return setup_with(host, OF_FORWARD, bucket_bytes);
}

/* Keeps the gradient of t back; in its place is something else. */
static parcel *send(twin *t) {
    parcel *p = calloc(1, sizeof *p);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    p->gradient = t->tensor->grad;
    ck_assert_uint_le(p->gradient->bytes, sizeof p->values);
    memcpy(p->values, p->gradient->data, p->gradient->bytes);
    memset(p->gradient->data, 0x3f, p->gradient->bytes);
    t->tensor->awaits = p;
    return p;
}

static void deliver(parcel *p) {
    pthread_mutex_lock(&p->lock);
    memcpy(p->gradient->data, p->values, p->gradient->bytes);
    p->here = true;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

static void lose(parcel *p) {
    pthread_mutex_lock(&p->lock);
    p->lost = true;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

static void forget(parcel *p) {
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->changed);
    free(p);
}

static void *deliver_when_awaited(void *opaque) {
    parcel *p = opaque;
    pthread_mutex_lock(&p->lock);
    while (!p->waiting)
        pthread_cond_wait(&p->changed, &p->lock);
    pthread_mutex_unlock(&p->lock);
    deliver(p);
    return NULL;
}

static pthread_t postman(parcel *p) {
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, deliver_when_awaited, p), 0);
    return thread;
}

/* The twin's yardstick is updated from the gradient that comes. */
static parcel *send_expected(fixture *f, twin *t) {
    backward(t);
    expect_update(f, t);
    return send(t);
}

static void step_only(fixture *f) {
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_OK);
}

START_TEST(a_use_waits_for_the_gradient) {
    fixture *f = late(0);
    twin *t = add(f, 100);
    for (int i = 0; i < 3; i++) {
        parcel *p = send_expected(f, t);
        step_only(f);
        ck_assert(!launched(t) && counts(f).pending == 1);
        pthread_t thread = postman(p);
        check_twin(t);
        pthread_join(thread, NULL);
        ck_assert_int_eq(p->waits, 1);
        forget(p);
    }
    t->tensor->awaits = NULL;
    teardown(f);
}
END_TEST

START_TEST(a_gradient_that_has_come_is_not_waited_for) {
    fixture *f = late(0);
    twin *t = add(f, 100);
    parcel *p = send_expected(f, t);
    step_only(f);
    deliver(p);
    check_twin(t);
    ck_assert_int_eq(p->waits, 0);
    forget(p);
    t->tensor->awaits = NULL;
    teardown(f);
}
END_TEST

START_TEST(a_neighbour_runs_along_only_if_its_gradient_is_there) {
    fixture *f = late(1 << 20);
    twin *first = add(f, 100), *second = add(f, 100), *third = add(f, 100);
    backward_all(f);
    for (size_t i = 0; i < 3; i++)
        expect_update(f, &f->twins[i]);
    parcel *p = send(second);
    step_only(f);
    fake_use(first->tensor->param, false);
    ck_assert(launched(first) && !launched(second) && !launched(third));
    fake_use(third->tensor->param, false);
    ck_assert(launched(third) && !launched(second));
    deliver(p);
    check_twin(second);
    forget(p);
    second->tensor->awaits = NULL;
    teardown(f);
}
END_TEST

static void *use(void *opaque) {
    fake_use(((twin *)opaque)->tensor->param, false);
    return NULL;
}

START_TEST(who_waits_holds_up_nobody) {
    fixture *f = late(OF_BUCKET_NONE);
    twin *missing = add(f, 100), *other = add(f, 100);
    backward_all(f);
    expect_update(f, missing);
    expect_update(f, other);
    parcel *p = send(missing);
    step_only(f);
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, use, missing), 0);
    pthread_mutex_lock(&p->lock);
    while (!p->waiting)
        pthread_cond_wait(&p->changed, &p->lock);
    pthread_mutex_unlock(&p->lock);
    check_twin(other); /* would hang */
    deliver(p);
    pthread_join(thread, NULL);
    check_twin(missing);
    forget(p);
    missing->tensor->awaits = NULL;
    teardown(f);
}
END_TEST

START_TEST(flush_and_the_next_step_wait) {
    fixture *f = late(0);
    twin *t = add(f, 100);
    for (int i = 0; i < 2; i++) {
        parcel *p = send_expected(f, t);
        step_only(f);
        pthread_t thread = postman(p);
        t->tensor->awaits = NULL;
        if (i == 0) {
            ck_assert_int_eq(of_plan_flush(f->plan), OF_OK);
        } else {
            fake_set_grad(t->tensor, NULL);
            step_only(f);
        }
        pthread_join(thread, NULL);
        ck_assert(launched(t));
        forget(p);
    }
    teardown(f);
}
END_TEST

START_TEST(what_cannot_be_left_pending_waits_in_step) {
    fixture *f = late(0);
    twin *kinds[] = {add_eager(f, 100), add(f, 50), add(f, 70)};
    kinds[1]->tensor->shared = true;
    kinds[2]->tensor->exclusive = true;
    for (int i = 0; i < 3; i++) {
        parcel *p = send_expected(f, kinds[i]);
        pthread_t thread = postman(p);
        step_only(f);
        pthread_join(thread, NULL);
        ck_assert(launched(kinds[i]));
        kinds[i]->tensor->awaits = NULL;
        fake_set_grad(kinds[i]->tensor, NULL);
        forget(p);
    }
    teardown(f);
}
END_TEST

START_TEST(a_gradient_that_never_comes_is_an_error_at_every_use) {
    fixture *f = late(0);
    twin *t = add(f, 100);
    parcel *p = send_expected(f, t);
    step_only(f);
    lose(p);
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(of_access(t->tensor->param, false), OF_ACCESS_FAILED);
        ck_assert_str_eq(of_error_message(), "the network is gone");
        ck_assert_int_eq(of_plan_flush(f->plan), OF_REFUSED);
        ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_REFUSED);
        ck_assert_str_eq(of_error_message(), "the network is gone");
    }
    ck_assert(!launched(t) && counts(f).pending == 1);
    of_plan_clear(f->plan);
    ck_assert_ptr_nonnull(strstr(f->host->last_log, "the network is gone"));
    teardown_unchecked(f);
    forget(p);
}
END_TEST

START_TEST(a_step_that_waits_in_vain_says_so) {
    fixture *f = late(0);
    twin *t = add_eager(f, 100);
    parcel *p = send_expected(f, t);
    lose(p);
    ck_assert_int_eq(of_plan_step(f->plan, NULL, 0, NULL), OF_REFUSED);
    ck_assert_ptr_nonnull(strstr(of_error_message(), "the network is gone"));
    ck_assert(!launched(t));
    teardown_unchecked(f);
    forget(p);
}
END_TEST

START_TEST(a_table_with_a_hole_is_refused) {
    static const of_await_host hole = {.struct_size = sizeof hole, .await = await};
    static const of_await_host small = {.struct_size = 8, .await = await};
    fake_host *host = fake_host_new();
    of_plan *plan = NULL;
    host->table.await = &hole;
    ck_assert_int_eq(of_plan_create(&host->table, "adam", NULL, &plan), OF_INVALID);
    host->table.await = &small;
    ck_assert_int_eq(of_plan_create(&host->table, "adam", NULL, &plan), OF_INVALID);
    fake_host_free(host);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("arrivals");
    TCase *tests = tcase_create("arrivals");
    suite_add_tcase(suite, tests);
    tcase_add_test(tests, a_use_waits_for_the_gradient);
    tcase_add_test(tests, a_gradient_that_has_come_is_not_waited_for);
    tcase_add_test(tests, a_neighbour_runs_along_only_if_its_gradient_is_there);
    tcase_add_test(tests, who_waits_holds_up_nobody);
    tcase_add_test(tests, flush_and_the_next_step_wait);
    tcase_add_test(tests, what_cannot_be_left_pending_waits_in_step);
    tcase_add_test(tests, a_gradient_that_never_comes_is_an_error_at_every_use);
    tcase_add_test(tests, a_step_that_waits_in_vain_says_so);
    tcase_add_test(tests, a_table_with_a_hole_is_refused);
    return run(suite);
}
