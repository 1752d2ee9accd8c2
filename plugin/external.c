/* SPDX-License-Identifier: BSD-3-Clause */
/* external.c: updates that the host makes by operators of its own. */
#include "floating.h"
#include "internal.h"

static bool apply(of_plan *plan, of_update *update) {
    const unsigned outside = of_floating_now();
    if (OF_GUARD(floating))
        of_floating_set(update->floating);
    const bool done = plan->host.external->apply(plan->host.ctx, &update->in);
    of_floating_set(outside);
    return done;
}

bool of_is_by_host(const of_update *update) {
    return update->in.program && update->in.program->by_host;
}

bool of_apply(of_plan *plan, const of_list *list) {
    bool done = true;
    for (of_update *u = list->first; u && done; u = u->next)
        done = apply(plan, u);
    return done;
}
