/* SPDX-License-Identifier: BSD-3-Clause */
/* Where memory order is weak, a launch has every thread pass a fence before marks go, and marks
 * stay where the system refuses that. The linker puts the function below in the place of
 * syscall(). */
#include "fence.h"

#include <errno.h>
#include <linux/membarrier.h>
#include <sys/syscall.h>

#include "fixture.h"

static bool refuses;    /* the system, everything */
static bool registered; /* this process */
static int fences;

long __wrap_syscall(long number, int command, int flags);
long __wrap_syscall(long number, int command, int flags) {
    ck_assert_int_eq(number, SYS_membarrier);
    ck_assert_int_eq(flags, 0);
    if (command == MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED && !refuses) {
        registered = true;
        return 0;
    }
    if (command == MEMBARRIER_CMD_PRIVATE_EXPEDITED && registered && !refuses) {
        fences++;
        return 0;
    }
    errno = refuses ? ENOSYS : EPERM;
    return -1;
}

static int fences_of_a_launch(void) {
    return OF_ORDER_IS_WEAK ? 1 : 0;
}

START_TEST(the_first_fence_registers_the_process) {
    registered = false;
    fences = 0;
    ck_assert(of_fence_all());
    ck_assert(registered);
    ck_assert_int_eq(fences, 1);
    ck_assert(of_fence_all());
    ck_assert_int_eq(fences, 2);
}
END_TEST

START_TEST(a_launch_of_many_updates_has_one_fence) {
    fixture *f = setup(OF_FORWARD, 0);
    for (int i = 0; i < 5; i++)
        add(f, 10);
    backward_all(f);
    step(f);
    ck_assert_uint_eq(counts(f).pending, 5);
    fences = 0;
    check_twin(&f->twins[0]);
    ck_assert_uint_eq(counts(f).pending, 0);
    ck_assert_int_eq(fences, fences_of_a_launch());
    teardown(f);
}
END_TEST

static void (*settle)(void *ctx, void *references, bool was_deferred);
static int fences_before_settle;

static void watched_settle(void *ctx, void *references, bool was_deferred) {
    fences_before_settle = fences;
    settle(ctx, references, was_deferred);
}

START_TEST(the_fence_comes_before_the_host_takes_marks_off) {
    fake_host *host = fake_host_new();
    settle = host->table.settle;
    host->table.settle = watched_settle;
    fixture *f = setup_with(host, OF_FORWARD, OF_BUCKET_NONE);
    twin *t = add(f, 10);
    backward(t);
    step(f);
    fences = 0;
    check_twin(t);
    ck_assert_int_eq(fences_before_settle, fences_of_a_launch());
    teardown(f);
}
END_TEST

START_TEST(what_has_no_mark_needs_no_fence) {
    fixture *f = setup(OF_BACKWARD, 0);
    twin *t = add(f, 10);
    fences = 0;
    gradient(f, t);
    step(f);
    ck_assert(launched(t));
    ck_assert_int_eq(fences, 0);
    teardown(f);
}
END_TEST

/* The last: there is no way back. */
START_TEST(without_a_fence_marks_stay) {
    ck_assert(!of_has_no_fence());
    of_fence_or_keep_marks();
    ck_assert(!of_has_no_fence());
    refuses = true;
    of_fence_or_keep_marks();
    ck_assert(of_has_no_fence());
    ck_assert(of_marks_stay() == (OF_ORDER_IS_WEAK != 0));
    refuses = false;
    of_fence_or_keep_marks();
    ck_assert(of_has_no_fence());
}
END_TEST

int main(void) {
    Suite *suite = suite_create("fence");
    TCase *tests = tcase_create("fence");
    tcase_add_test(tests, the_first_fence_registers_the_process);
    tcase_add_test(tests, a_launch_of_many_updates_has_one_fence);
    tcase_add_test(tests, the_fence_comes_before_the_host_takes_marks_off);
    tcase_add_test(tests, what_has_no_mark_needs_no_fence);
    tcase_add_test(tests, without_a_fence_marks_stay);
    suite_add_tcase(suite, tests);
    return run(suite);
}
