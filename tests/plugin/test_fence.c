/* SPDX-License-Identifier: BSD-3-Clause */
/* Where memory order is weak, a launch has every thread pass a fence before marks go, and marks
 * stay where the system refuses that. The linker puts the function below in the place of
 * syscall(). */
#include "fence.h"
#include "membarrier.h"

#include <errno.h>
#include <linux/membarrier.h>
#include <sys/syscall.h>

#include "fake_device.h"

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

enum { FENCES_OF_A_LAUNCH = OF_ORDER_IS_WEAK ? 2 : 0 };

/* A host whose events are known by how many fences and seals came before them. */
static void (*settle)(void *ctx, void *references, bool was_deferred);
static int unsealed;
static int fences_before_unseal;
static int fences_before_settle;
static int unsealed_before_settle;

static void unseal(void *ctx, void *references) {
    (void)ctx;
    (void)references;
    if (unsealed++ == 0)
        fences_before_unseal = fences;
}

static void watched_settle(void *ctx, void *references, bool was_deferred) {
    fences_before_settle = fences;
    unsealed_before_settle = unsealed;
    settle(ctx, references, was_deferred);
}

static fixture *setup_watched(void) {
    fake_host *host = fake_host_new();
    settle = host->table.settle;
    host->table.settle = watched_settle;
    host->table.unseal = unseal;
    return setup_with(host, OF_FORWARD, 0);
}

TEST(the_first_fence_registers_the_process) {
    registered = false;
    fences = 0;
    ck_assert(of_fence_all());
    ck_assert(registered);
    ck_assert_int_eq(fences, 1);
    ck_assert(of_fence_all());
    ck_assert_int_eq(fences, 2);
}

WITH(fences_come_before_seals_and_before_marks_of_all_updates_of_a_launch, setup_watched(),
     teardown) {
    enum { UPDATES = 5 };
    add_some(f, UPDATES, 10);
    train(f);
    ck_assert_uint_eq(counts(f).pending, UPDATES);
    fences = unsealed = 0;
    fences_before_unseal = fences_before_settle = unsealed_before_settle = -1;
    check_twin(&f->twins[0]);
    ck_assert_uint_eq(counts(f).pending, 0);
    ck_assert_int_eq(fences_before_unseal, OF_ORDER_IS_WEAK ? 1 : -1);
    ck_assert_int_eq(unsealed_before_settle, OF_ORDER_IS_WEAK ? UPDATES : 0);
    ck_assert_int_eq(fences_before_settle, FENCES_OF_A_LAUNCH);
    ck_assert_int_eq(fences, FENCES_OF_A_LAUNCH);
}

FORWARD(a_host_without_seals_has_one_fence_a_launch) {
    twin *t = pending(f, 10);
    fences = 0;
    check_twin(t);
    ck_assert_int_eq(fences, OF_ORDER_IS_WEAK ? 1 : 0);
}

/* A scaling in flight keeps its marks until it is known to be done. */
ON_DEVICE(a_fence_comes_before_what_is_on_a_device_is_forgotten, OF_FORWARD, OF_BUCKET_NONE) {
    twin *t = scaled_on_device(f, 10);
    fences = 0;
    look_at_gradient(t);
    ck_assert_uint_eq(counts(f).in_flight, 1);
    ck_assert_int_eq(fences, 0);
    OK(of_plan_drain(f->plan));
    ck_assert_uint_eq(counts(f).in_flight, 0);
    ck_assert_int_eq(fences, OF_ORDER_IS_WEAK ? 1 : 0);
}

BACKWARD(what_has_no_mark_needs_no_fence, 0) {
    twin *t = add(f, 10);
    fences = 0;
    gradient(f, t);
    step(f);
    ck_assert(launched(t));
    ck_assert_int_eq(fences, 0);
}

/* The last: there is no way back. */
TEST(without_a_fence_marks_stay) {
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
