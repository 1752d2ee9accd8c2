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
    backward_all(f);
    step(f);
    for (size_t i = 0; i < f->n; i++)
        if (!twin_equal(&f->twins[i]))
            return 3;
    fixture *g = setup(OF_BACKWARD, 0);
    gradient(g, add(g, 10));
    of_plan_release(g->plan);
    return 0;
}

static void fork_and_check(fixture *f) {
    of_fork_prepare();
    pid_t pid = fork();
    if (pid == 0)
        _exit(child_verdict(f));
    of_fork_parent();
    int status = -1;
    ck_assert_int_eq(waitpid(pid, &status, 0), pid);
    ck_assert(WIFEXITED(status));
    ck_assert_int_eq(WEXITSTATUS(status), 0);
}

START_TEST(fork_with_updates_pending) {
    fixture *f = setup(OF_FORWARD, 0);
    for (int i = 0; i < 5; i++)
        add(f, 100);
    backward_all(f);
    step(f);
    ck_assert(of_any_pending());
    fork_and_check(f);
    ck_assert(!of_any_pending());
    backward_all(f);
    step(f);
    teardown(f);
}
END_TEST

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
START_TEST(fork_while_another_thread_steps) {
    fixture *f = setup(OF_FORWARD, 0);
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
        backward_all(f);
        step(f);
        fork_and_check(f);
    }
    atomic_store(&s.done, true);
    pthread_join(thread, NULL);
    for (size_t i = 0; i < g->n; i++)
        while (g->twins[i].step < g->twins[i].tensor->step)
            expect_update(g, &g->twins[i]);
    teardown(g);
    teardown(f);
}
END_TEST

int main(void) {
    Suite *suite = suite_create("fork");
    TCase *all = tcase_create("fork");
    tcase_set_timeout(all, 120);
    tcase_add_test(all, fork_with_updates_pending);
    tcase_add_test(all, fork_while_another_thread_steps);
    suite_add_tcase(suite, all);
    return run(suite);
}
