/* SPDX-License-Identifier: BSD-3-Clause */
/* update.c: update records, the lists they are in and the pool they come from. */
#include <stdlib.h>
#include <string.h>

#include "floating.h"
#include "internal.h"

void of_list_append(of_list *list, of_update *update) {
    update->prev = list->last;
    update->next = NULL;
    if (list->last)
        list->last->next = update;
    else
        list->first = update;
    list->last = update;
    list->count++;
    list->bytes += update->bytes;
}

void of_list_remove(of_list *list, of_update *update) {
    if (update->prev)
        update->prev->next = update->next;
    else
        list->first = update->next;
    if (update->next)
        update->next->prev = update->prev;
    else
        list->last = update->prev;
    list->count--;
    list->bytes -= update->bytes;
}

void of_inputs_clear(of_update *update) {
    update->in = (of_inputs){.hold = update + 1};
    update->counted = false;
    update->scaling = false;
    update->n_factors = 0;
    update->factors[0] = update->factors[1] = 1.0;
    update->scale = NULL;
    update->reader = NULL;
    update->floating = of_floating_now();
}

/* Records are freed with their plan and not before: of_touch() may look at one
 * that was launched meanwhile. So the pool grows to the most that was ever in
 * use and then allocates no more. */
of_update *of_pool_take(of_plan *plan) {
    if (!plan->spare)
        plan->spare = atomic_exchange_explicit(&plan->returned, NULL, memory_order_acquire);
    of_update *update = plan->spare;
    if (update) {
        plan->spare = update->next;
    } else {
        update = calloc(1, sizeof *update + plan->host.hold_bytes);
        if (!update) {
            of_set_error("out of memory for an update");
            return NULL;
        }
        update->plan = plan;
    }
    atomic_store_explicit(&update->holders, 1, memory_order_relaxed);
    return update;
}

void of_pool_give(of_plan *plan, of_update *update) {
    of_update *head = atomic_load_explicit(&plan->returned, memory_order_relaxed);
    do
        update->next = head;
    while (!atomic_compare_exchange_weak_explicit(&plan->returned, &head, update,
                                                  memory_order_release, memory_order_relaxed));
}

static void free_chain(of_update *update) {
    while (update) {
        of_update *next = update->next;
        free(update);
        update = next;
    }
}

void of_pool_free(of_plan *plan) {
    free_chain(plan->spare);
    free_chain(atomic_load_explicit(&plan->returned, memory_order_acquire));
}

/* Alone, nobody else can become a holder meanwhile. */
void of_update_drop(of_update *update) {
    if (atomic_load_explicit(&update->holders, memory_order_acquire) == 1 ||
        atomic_fetch_sub_explicit(&update->holders, 1, memory_order_acq_rel) == 1)
        of_pool_give(update->plan, update);
}

void of_updates_release(of_plan *plan, of_list *list) {
    of_update *update = list->first;
    *list = (of_list){0};
    while (update) {
        of_update *next = update->next;
        plan->host.release(plan->host.ctx, update->in.hold);
        of_update_drop(update);
        update = next;
    }
}

static of_status check_state(const of_plan *plan, const of_inputs *in, unsigned used) {
    for (size_t i = 0; i < plan->rule->n_state; i++)
        if ((used >> i & 1) && !in->state[i])
            return of_fail(OF_INVALID, "the optimizer state '%s' is missing", plan->rule->state[i]);
    return OF_OK;
}

static of_status check_inputs(const of_plan *plan, const of_inputs *in, unsigned used) {
    if (in->numel < 0 || in->n_keys > OF_MAX_KEYS || !(in->count.step >= 1))
        return of_fail(OF_INVALID,
                       "bad inputs of an update: %lld elements, %zu keys, step %g (first is 1)",
                       (long long)in->numel, in->n_keys, in->count.step);
    if ((unsigned)in->dtype >= OF_DTYPE_COUNT || (unsigned)in->device > OF_CUDA)
        return of_fail(OF_INVALID, "unknown dtype %d or device %d", (int)in->dtype,
                       (int)in->device);
    if (plan->rule->by_host)
        return OF_OK;
    if (in->device == OF_CPU ? !plan->kernels[in->dtype] : !plan->host.device)
        return of_fail(OF_INVALID, "no kernel of '%s' for %s parameters on %s", plan->rule->name,
                       of_dtype_name(in->dtype), in->device == OF_CPU ? "cpu" : "cuda");
    if (in->numel == 0)
        return OF_OK;
    if (!in->param || (!in->grad && !in->alone)) /* commit() may make a dense copy */
        return of_fail(OF_INVALID, "the parameter or its gradient has elements but no memory");
    return check_state(plan, in, used);
}

static void fill_scalars(const of_rule *rule, of_group *group, of_update *update) {
    of_count *count = &update->in.count;
    const bool on_cpu = update->in.device == OF_CPU;
    of_prepared *known = &group->prepared[update->in.device];
    if (rule->n_counters || known->step != count->step) { /* counters: of a parameter's own */
        /* Updates on a device are told apart by all bytes. */
        memset(known->scalars, 0, sizeof known->scalars);
        (on_cpu ? rule->prepare : rule->prepare_gpu)(group->hyper, count, known->scalars);
        known->step = count->step;
    }
    memcpy(update->scalars, known->scalars,
           on_cpu ? rule->scalars_size : OF_MAX_HYPER * sizeof(double));
}

of_status of_update_complete(of_plan *plan, of_update *update) {
    of_inputs *in = &update->in;
    of_group *group = &plan->groups[plan->slots[update->slot].group];
    of_status status = check_inputs(plan, in, group->used);
    if (status != OF_OK)
        return status;
    update->bytes = (size_t)in->numel * of_dtype_size(in->dtype);
    if (in->device != OF_CPU && plan->mode == OF_FORWARD) /* else the plan's lock is held */
        of_scaling_share(plan, update);
    if (plan->rule->by_host || (in->device != OF_CPU && !plan->rule->prepare_gpu)) {
        memcpy(update->scalars, group->hyper, sizeof group->hyper); /* they take the options */
        return OF_OK;
    }
    fill_scalars(plan->rule, group, update);
    if (in->device != OF_CPU)
        return OF_OK;
    update->kernel = plan->kernels[in->dtype];
    update->n_factors =
        of_registry_factors(of_scale_key(in->grad_key), update->factors, &update->norm);
    return OF_OK;
}
