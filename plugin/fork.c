/* SPDX-License-Identifier: BSD-3-Clause */
/* fork.c: a child gets a copy of the memory but none of the other threads, so
 * nothing may be pending and no lock held by them when it is made. */
#include "internal.h"

/* Another thread may leave updates pending between the flush and the locks. */
void of_fork_prepare(void)
{
    for (;;) {
        if (OF_GUARD(fork))
            of_flush_all();
        of_plans_lock();
        of_registry_lock();
        if (!of_any_pending() || !OF_GUARD(fork))
            return;
        of_fork_parent();
    }
}

void of_fork_parent(void)
{
    of_registry_unlock();
    of_plans_unlock();
}

void of_fork_child(void)
{
    of_plans_adopt();
    of_fork_parent();
}
