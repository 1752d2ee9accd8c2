/* SPDX-License-Identifier: BSD-3-Clause */
/* Updates whose gradient is still on its way: they are created without it, launched with it, and
 * whoever waits for one gradient holds up nobody who uses another parameter. */
#include <stdlib.h>

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

static void forget(twin *t, parcel *p) {
    t->tensor->awaits = NULL;
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->changed);
    free(p);
}

static void until_awaited(parcel *p) {
    pthread_mutex_lock(&p->lock);
    while (!p->waiting)
        pthread_cond_wait(&p->changed, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

static void *deliver_when_awaited(void *opaque) {
    until_awaited(opaque);
    deliver(opaque);
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

#define LATE(name, bucket_bytes) WITH(name, late(bucket_bytes), teardown)
#define LOST(name) WITH(name, late(0), teardown_unchecked)

LATE(a_use_waits_for_the_gradient, 0) {
    twin *t = add(f, 100);
    for (int i = 0; i < 3; i++) {
        parcel *p = send_expected(f, t);
        step_only(f);
        ck_assert(!launched(t) && counts(f).pending == 1);
        pthread_t thread = postman(p);
        check_twin(t);
        pthread_join(thread, NULL);
        ck_assert_int_eq(p->waits, 1);
        forget(t, p);
    }
}

LATE(a_gradient_that_has_come_is_not_waited_for, 0) {
    twin *t = add(f, 100);
    parcel *p = send_expected(f, t);
    step_only(f);
    deliver(p);
    check_twin(t);
    ck_assert_int_eq(p->waits, 0);
    forget(t, p);
}

LATE(a_neighbour_runs_along_only_if_its_gradient_is_there, 1 << 20) {
    twin *first = add(f, 100), *second = add(f, 100), *third = add(f, 100);
    backward_expected(f);
    parcel *p = send(second);
    step_only(f);
    fake_use(first->tensor->param, false);
    ck_assert(launched(first) && !launched(second) && !launched(third));
    fake_use(third->tensor->param, false);
    ck_assert(launched(third) && !launched(second));
    deliver(p);
    check_twin(second);
    forget(second, p);
}

static void *use(void *opaque) {
    fake_use(((twin *)opaque)->tensor->param, false);
    return NULL;
}

LATE(who_waits_holds_up_nobody, OF_BUCKET_NONE) {
    twin *missing = add(f, 100), *other = add(f, 100);
    backward_expected(f);
    parcel *p = send(missing);
    step_only(f);
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, use, missing), 0);
    until_awaited(p);
    check_twin(other); /* would hang */
    deliver(p);
    pthread_join(thread, NULL);
    check_twin(missing);
    forget(missing, p);
}

LATE(flush_and_the_next_step_wait, 0) {
    twin *t = add(f, 100);
    for (int i = 0; i < 2; i++) {
        parcel *p = send_expected(f, t);
        step_only(f);
        pthread_t thread = postman(p);
        t->tensor->awaits = NULL;
        if (i == 0) {
            OK(of_plan_flush(f->plan));
        } else {
            fake_set_grad(t->tensor, NULL);
            step_only(f);
        }
        pthread_join(thread, NULL);
        ck_assert(launched(t));
        forget(t, p);
    }
}

LATE(what_cannot_be_left_pending_waits_in_step, 0) {
    twin *kinds[] = {add_eager(f, 100), add(f, 50), add(f, 70)};
    kinds[1]->tensor->shared = true;
    kinds[2]->tensor->exclusive = true;
    for (int i = 0; i < 3; i++) {
        parcel *p = send_expected(f, kinds[i]);
        pthread_t thread = postman(p);
        step_only(f);
        pthread_join(thread, NULL);
        ck_assert(launched(kinds[i]));
        fake_set_grad(kinds[i]->tensor, NULL);
        forget(kinds[i], p);
    }
}

LOST(a_gradient_that_never_comes_is_an_error_at_every_use) {
    twin *t = add(f, 100);
    parcel *p = send_expected(f, t);
    step_only(f);
    lose(p);
    for (int i = 0; i < 2; i++) {
        FAILS(OF_ACCESS_FAILED, of_access(t->tensor->param, false), "the network is gone");
        FAILS(OF_REFUSED, of_plan_flush(f->plan), "the network is gone");
        FAILS(OF_REFUSED, of_plan_step(f->plan, NULL, 0, NULL), "the network is gone");
    }
    ck_assert(!launched(t) && counts(f).pending == 1);
    of_plan_clear(f->plan);
    ck_assert_ptr_nonnull(strstr(f->host->last_log, "the network is gone"));
    forget(t, p);
}

LOST(a_step_that_waits_in_vain_says_so) {
    twin *t = add_eager(f, 100);
    parcel *p = send_expected(f, t);
    lose(p);
    FAILS(OF_REFUSED, of_plan_step(f->plan, NULL, 0, NULL), "the network is gone");
    ck_assert(!launched(t));
    forget(t, p);
}
