/* SPDX-License-Identifier: BSD-3-Clause */
/* inputs.c: what an update needs beside what the host has collected: checks, the kernel, the
 * scalars of this step, and the factors that are pending on its gradient. */
#include <string.h>

#include "internal.h"

static inline of_status check_state(const of_plan *plan, const of_inputs *in, unsigned used) {
    unsigned left = used & ((1u << plan->rule->n_state) - 1);
    for (size_t i = 0; left; i++, left >>= 1)
        if ((left & 1) && !in->state[i])
            return of_fail(OF_INVALID, "the optimizer state '%s' is missing", plan->rule->state[i]);
    return OF_OK;
}

static __attribute__((noinline)) of_status check_program(const of_plan *plan, const of_inputs *in) {
    if (!in->program)
        return of_fail(OF_INVALID, "the update has no program");
    if (in->program->by_host && !plan->host.external)
        return of_fail(OF_INVALID, "the program needs a host that runs its own operators");
    return check_state(plan, in, (in->program->reads | in->program->writes) >> OF_REGISTER_STATE);
}

static inline of_status check_state_or_program(const of_plan *plan, const of_inputs *in) {
    return plan->rule->runs_programs ? check_program(plan, in) : check_state(plan, in, in->used);
}

static __attribute__((noinline)) of_status check_product(const of_plan *plan, const of_inputs *in) {
    const bool by_host = in->program && in->program->by_host;
    if (!plan->host.product || in->device != OF_CPU || in->exclusive || by_host || !in->param)
        return of_fail(OF_INVALID, "a gradient that is a product is of a parameter on the CPU, of "
                                   "a host that computes it, and neither exclusive nor updated by "
                                   "the host");
    const size_t line = OF_CACHE_LINE;
    if (in->rows < 1 || in->numel % in->rows != 0 || in->panel_rows < 1 ||
        (size_t)(in->numel / in->rows * in->panel_rows) * of_dtype_size(in->dtype) % line != 0)
        return of_fail(OF_INVALID, "a product of %lld rows, %lld at a time, can't have %lld elements",
                       (long long)in->rows, (long long)in->panel_rows, (long long)in->numel);
    return check_state_or_program(plan, in);
}

static inline of_status check_numbers(const of_inputs *in) {
    if (in->numel < 0 || in->n_keys > OF_MAX_KEYS || !(in->count.step >= 1))
        return of_fail(OF_INVALID,
                       "bad inputs of an update: %lld elements, %zu keys, step %g (first is 1)",
                       (long long)in->numel, in->n_keys, in->count.step);
    return OF_OK;
}

static of_status check_kind(const of_plan *plan, const of_inputs *in) {
    if ((unsigned)in->dtype >= OF_DTYPE_COUNT || (unsigned)in->device > OF_CUDA)
        return of_fail(OF_INVALID, "unknown dtype %d or device %d", (int)in->dtype,
                       (int)in->device);
    if (in->device == OF_CPU ? !plan->kernels[in->dtype] : !plan->host.gpu)
        return of_fail(OF_INVALID, "no kernel of '%s' for %s parameters on %s", plan->rule->name,
                       of_dtype_name(in->dtype), in->device == OF_CPU ? "cpu" : "cuda");
    if (in->mixed &&
        (in->device == OF_CPU || in->dtype != OF_FLOAT32 || !of_rule_mixed(plan->rule)))
        return of_fail(OF_INVALID, "no kernel of '%s' for %s parameters on %s with bfloat16 state",
                       plan->rule->name, of_dtype_name(in->dtype),
                       in->device == OF_CPU ? "cpu" : "cuda");
    if (in->wide && (!plan->rule->rounds || of_dtype_size(in->dtype) != 2))
        return of_fail(OF_INVALID, "no kernel of '%s' for %s parameters with float32 state",
                       plan->rule->name, of_dtype_name(in->dtype));
    return OF_OK;
}

static __attribute__((noinline)) of_status complete_kind(const of_plan *plan, of_update *update) {
    const of_inputs *in = &update->in;
    if (check_kind(plan, in) != OF_OK)
        return OF_INVALID;
    update->bytes = (size_t)in->numel * of_dtype_size(in->dtype);
    update->kernel = in->device == OF_CPU ? plan->kernels[in->dtype] : NULL;
    return OF_OK;
}

static inline of_status check_memory(const of_plan *plan, const of_inputs *in) {
    if (in->numel == 0)
        return OF_OK;
    if (in->product)
        return check_product(plan, in);
    if (!in->param || (!in->grad && !in->exclusive)) /* commit() may make a dense copy */
        return of_fail(OF_INVALID, "the parameter or its gradient has elements but no memory");
    return check_state_or_program(plan, in);
}

/* Updates on a device are told apart by all bytes. */
static __attribute__((noinline)) void prepare_scalars(const of_rule *rule, of_group *group,
                                                      of_update *update) {
    of_count *count = &update->in.count;
    of_prepared *prepared = &group->prepared[update->in.device];
    memset(prepared->scalars, 0, sizeof prepared->scalars);
    (update->in.device == OF_CPU ? rule->prepare : rule->prepare_gpu)(group->hyper, count,
                                                                      prepared->scalars);
    prepared->step = count->step;
}

static inline void fill_scalars(const of_rule *rule, of_group *group, of_update *update) {
    of_prepared *prepared = &group->prepared[update->in.device];
    if (rule->n_counters || prepared->step != update->in.count.step) /* those are each one's own */
        prepare_scalars(rule, group, update);
    memcpy(update->scalars, prepared->scalars,
           update->in.device == OF_CPU ? rule->scalars_size : OF_MAX_HYPER * sizeof(double));
}

of_status of_update_complete(of_plan *plan, of_group *group, of_update *update, bool again) {
    of_inputs *in = &update->in;
    if (check_numbers(in) != OF_OK || (!again && complete_kind(plan, update) != OF_OK) ||
        check_memory(plan, in) != OF_OK)
        return OF_INVALID;
    if (in->device != OF_CPU && plan->mode == OF_FORWARD) /* else the plan's lock is held */
        of_scaling_share(plan, update);
    const bool runs_program = plan->rule->runs_programs;
    if (in->device != OF_CPU && !plan->rule->prepare_gpu && !runs_program) {
        memcpy(update->scalars, group->hyper, sizeof group->hyper); /* they take the options */
        return OF_OK;
    }
    if (runs_program) {
        memset(update->scalars, 0, OF_MAX_HYPER * sizeof(double)); /* compared on a device */
        memcpy(update->scalars, &in->program, sizeof in->program);
    } else {
        fill_scalars(plan->rule, group, update);
    }
    if (in->device == OF_CPU && of_any_scaled())
        update->n_factors = of_scale_factors(in->grad_key, update->factors, &update->norm);
    return OF_OK;
}
