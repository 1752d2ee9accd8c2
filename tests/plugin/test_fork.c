/* SPDX-License-Identifier: BSD-3-Clause */
/* fork(): both sides find everything launched and every lock free. */
#include <sys/wait.h>
#include <unistd.h>

#include "fixture.h"

/* The child's verdict: 0, or the number of the first thing that is wrong. */
static int child_verdict(fixture *f) {
    of_fork_child();
    if (of_any_pending())
        return 1;
    for (size_t i = 0; i < f->n; i++)
        if (!launched(&f->twins[i]))
            return 2;
    f->host->n_threads = 1;
    train(f);
    for (size_t i = 0; i < f->n; i++)
        if (!twin_equal(&f->twins[i]))
            return 3;
    fixture *g = setup(OF_BACKWARD, 0);
    gradient(g, add(g, 10));
    of_plan_release(g->plan);
    return 0;
}

static void ends_well(pid_t child) {
    int status = -1;
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %d", status);
}

static void fork_and_check(fixture *f) {
    of_fork_prepare();
    pthread_mutex_lock(&f->host->lock); /* another thread may be recording an event */
    pid_t pid = fork();
    pthread_mutex_unlock(&f->host->lock);
    if (pid == 0)
        _exit(child_verdict(f));
    of_fork_parent();
    ends_well(pid);
}

FORWARD(fork_with_updates_pending) {
    add_some(f, 5, 100);
    train(f);
    ck_assert(of_any_pending());
    fork_and_check(f);
    ck_assert(!of_any_pending());
    train(f);
}

static void step_plan(void *opaque) {
    of_plan_step(opaque, NULL, 0, NULL);
}

/* g leaves an update pending when f's are being flushed, and g's already were. */
FORWARD(update_left_pending_during_the_flush_is_launched_too) {
    fixture *g = setup_beside(f, OF_FORWARD);
    twin *t = add(f, 100);
    twin *late = add(g, 100);
    t->tensor->on_release = step_plan;
    t->tensor->arg = g->plan;
    backward(t);
    step(f);
    backward(late);
    expect_update(g, late);
    of_fork_prepare();
    ck_assert_msg(launched(late), "still pending when the process would fork");
    of_fork_parent();
    t->tensor->on_release = NULL;
    ck_assert_int_eq(atomic_load(&f->host->holds), 0);
    teardown(g);
}

static pthread_barrier_t in_collect;

static void wait_twice(void *unused) {
    (void)unused;
    pthread_barrier_wait(&in_collect);
    pthread_barrier_wait(&in_collect);
}

static void *step_once(void *opaque) {
    fixture *f = opaque;
    of_plan_step(f->plan, NULL, 0, NULL);
    return NULL;
}

FORWARD(child_is_not_locked_out_of_a_plan_that_a_thread_was_stepping) {
    twin *t = add(f, 100);
    t->tensor->on_collect = wait_twice;
    backward(t);
    expect_update(f, t);
    pthread_t thread;
    pthread_barrier_init(&in_collect, NULL, 2);
    ck_assert_int_eq(pthread_create(&thread, NULL, step_once, f), 0);
    pthread_barrier_wait(&in_collect);
    of_fork_prepare();
    pid_t pid = fork();
    if (pid == 0) {
        alarm(10); /* kills a child that waits for ever */
        of_fork_child();
        t->tensor->on_collect = NULL;
        _exit(of_plan_step(f->plan, NULL, 0, NULL) != OF_OK || !twin_equal(t));
    }
    of_fork_parent();
    pthread_barrier_wait(&in_collect);
    pthread_join(thread, NULL);
    pthread_barrier_destroy(&in_collect);
    ends_well(pid);
    t->tensor->on_collect = NULL;
}

typedef struct stepper {
    fixture *f;
    atomic_bool done;
} stepper;

static void *step_without_pause(void *opaque) {
    stepper *s = opaque;
    while (!atomic_load(&s->done))
        of_plan_step(s->f->plan, NULL, 0, NULL);
    return NULL;
}

/* The other thread's step() may be anywhere, also between two updates. */
FORWARD(fork_while_another_thread_steps) {
    fixture *g = setup_beside(f, OF_FORWARD);
    for (int i = 0; i < 5; i++) {
        add(f, 100);
        add(g, 100);
    }
    backward_all(g);
    stepper s = {.f = g};
    pthread_t thread;
    ck_assert_int_eq(pthread_create(&thread, NULL, step_without_pause, &s), 0);
    for (int i = 0; i < 20; i++) {
        train(f);
        fork_and_check(f);
    }
    atomic_store(&s.done, true);
    pthread_join(thread, NULL);
    for (size_t i = 0; i < g->n; i++)
        while (g->twins[i].step < g->twins[i].tensor->step)
            expect_update(g, &g->twins[i]);
    teardown(g);
}
