/* SPDX-License-Identifier: BSD-3-Clause */
/* Threads: whoever launches, every update runs once and in order. Run under
 * ThreadSanitizer too. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"

enum { THREADS = 8, ROUNDS = 60 };

typedef struct crowd {
    pthread_t threads[THREADS];
    pthread_barrier_t barrier;
    fixture *f;
    fixture *g;
    atomic_bool done;
    atomic_int next; /* thread number */
    atomic_int wrong;
} crowd;

static void start(crowd *c, int n, void *(*work)(void *)) {
    for (int i = 0; i < n; i++)
        if (pthread_create(&c->threads[i], NULL, work, c) != 0)
            abort();
}

static void join(crowd *c, int n) {
    for (int i = 0; i < n; i++)
        pthread_join(c->threads[i], NULL);
}

static fixture *many(of_mode mode, size_t bucket_bytes) {
    fixture *f = setup(mode, bucket_bytes);
    f->host->n_threads = 1;
    for (int i = 0; i < 16; i++)
        add(f, i % 4 ? 100 + i : 3000);
    return f;
}

/* Every thread reads every parameter after every step. */
static void *read_all(void *opaque) {
    crowd *c = opaque;
    int number = atomic_fetch_add(&c->next, 1);
    for (int round = 0; round < ROUNDS; round++) {
        pthread_barrier_wait(&c->barrier);
        for (size_t i = 0; i < c->f->n; i++) {
            const twin *t = &c->f->twins[(i + (size_t)number) % c->f->n];
            if (memcmp(fake_use(t->tensor->param, false), t->param, t->tensor->param->bytes) != 0)
                atomic_fetch_add(&c->wrong, 1);
        }
        pthread_barrier_wait(&c->barrier);
    }
    return NULL;
}

TEST(eight_threads_reading_after_step_all_see_the_update) {
    crowd c = {.f = many(OF_FORWARD, 0)};
    pthread_barrier_init(&c.barrier, NULL, THREADS + 1);
    start(&c, THREADS, read_all);
    for (int round = 0; round < ROUNDS; round++) {
        backward_all(c.f);
        step(c.f);
        pthread_barrier_wait(&c.barrier);
        pthread_barrier_wait(&c.barrier);
    }
    join(&c, THREADS);
    pthread_barrier_destroy(&c.barrier);
    ck_assert_int_eq(atomic_load(&c.wrong), 0);
    ck_assert_uint_eq(counts(c.f).created, 16 * ROUNDS);
    teardown(c.f);
}

/* Threads access and flush without pause, and read nothing. */
static void *access_all(void *opaque) {
    crowd *c = opaque;
    int number = atomic_fetch_add(&c->next, 1);
    for (int i = number; !atomic_load(&c->done); i++) {
        const fake_tensor *tensor = c->f->twins[(size_t)i % c->f->n].tensor;
        of_access(tensor->param, false);
        of_access(tensor->state[i % 2], false);
        if (number == 0 && i % 64 == 0)
            of_flush_all();
        if (number == 1)
            of_plan_flush(c->f->plan);
    }
    return NULL;
}

TEST(accessing_while_another_thread_steps_keeps_values_exact) {
    crowd c = {.f = many(OF_FORWARD, 0)};
    start(&c, THREADS, access_all);
    for (int round = 0; round < ROUNDS * 3; round++) {
        backward_all(c.f);
        step(c.f);
    }
    atomic_store(&c.done, true);
    join(&c, THREADS);
    of_counts n = counts(c.f);
    ck_assert_uint_eq(n.at_use + n.at_close + n.at_once + n.pending, n.created);
    teardown(c.f);
}

/* Two optimizers on the same memory, stepped by two threads: the order of two
 * steps is theirs to choose, but no update may be lost or torn. With lr 0 and
 * no decay only the state changes, and each plan has its own. */
static void *step_other(void *opaque) {
    crowd *c = opaque;
    while (!atomic_load(&c->done)) {
        of_plan_step(c->g->plan, NULL, 0, NULL);
        for (size_t i = 0; i < c->g->n; i++)
            of_access(c->g->twins[i].tensor->param, false);
    }
    return NULL;
}

TEST(two_plans_on_one_memory_from_two_threads) {
    crowd c = {.f = setup(OF_FORWARD, OF_BUCKET_NONE)};
    c.g = setup_beside(c.f, OF_FORWARD);
    c.f->host->n_threads = 1;
    set_lr(c.f, 1, 0);
    set_lr(c.g, 1, 0);
    for (int i = 0; i < 8; i++) {
        twin *t = add_to_group(c.f, 200, 1);
        t->tensor->shared = i % 3 == 0;
        twin *u = add_tensor(c.g, fake_tensor_alias(t->tensor), 1, i % 3 == 1);
        backward(u);
    }
    start(&c, 1, step_other);
    for (int round = 0; round < ROUNDS * 5; round++) {
        backward_all(c.f);
        step(c.f);
    }
    atomic_store(&c.done, true);
    join(&c, 1);
    for (size_t i = 0; i < c.g->n; i++)
        while (c.g->twins[i].step < c.g->twins[i].tensor->step)
            expect_update(c.g, &c.g->twins[i]);
    teardown(c.g);
    teardown(c.f);
}

static void *flush_without_pause(void *opaque) {
    crowd *c = opaque;
    while (!atomic_load(&c->done))
        of_flush_all();
    return NULL;
}

TEST(plans_come_and_go_while_others_flush_all) {
    crowd c = {.next = 0};
    start(&c, 3, flush_without_pause);
    for (int round = 0; round < ROUNDS; round++) {
        fixture *f = setup(OF_FORWARD, OF_BUCKET_NONE);
        f->host->n_threads = 1;
        add_some(f, 5, 50);
        train(f);
        of_plan_release(f->plan);
        for (size_t i = 0; i < f->n; i++)
            ck_assert(launched(&f->twins[i]));
        /* A flush may still be releasing the holds it took over. */
        while (atomic_load(&f->host->holds))
            sched_yield();
        f->plan = NULL;
        teardown_unchecked(f);
    }
    atomic_store(&c.done, true);
    join(&c, 3);
}
