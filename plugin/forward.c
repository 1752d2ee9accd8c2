/* SPDX-License-Identifier: BSD-3-Clause */
/* forward.c: forward fusion. step() creates every update and leaves it pending, for its
 * first use (access.c). */
#include "internal.h"

of_status of_forward_step(of_plan *plan, of_named *lacking, of_list *done) {
    of_list created = {0};
    of_status status =
        of_collect_all(plan, &(of_chosen){NULL, plan->n_slots}, &created, lacking);
    if (status == OF_OK)
        of_commit_all(plan, &created, true, OF_AT_ONCE, done);
    else
        *done = created;
    return status;
}
