/* SPDX-License-Identifier: BSD-3-Clause */
/* plan.c: plans from creation to the end, their groups and slots. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* By of_device. On a CPU: enough for small parameters to share a launch, small
 * enough for their gradients to be in cache still. On a GPU: so much that a launch takes several
 * times as long as it takes to start (docs/performance.md). */
static const size_t default_bucket_bytes[] = {(size_t)256 << 10, (size_t)16 << 20};

uint32_t of_abi_version(void) {
    return OF_ABI_VERSION;
}

static of_status check_table(const char *name, uint32_t size, size_t needed) {
    if (size >= needed)
        return OF_OK;
    return of_fail(OF_INVALID, "the host's %s has %u bytes, this library needs %zu", name,
                   (unsigned)size, needed);
}

#define SIZE_OF(table) (table) ? (table)->struct_size : UINT32_MAX, sizeof *(table)

static bool sizes_fit(const of_host *host) {
    return check_table("of_host", SIZE_OF(host)) == OF_OK &&
           check_table("of_backward_host", SIZE_OF(host->backward)) == OF_OK &&
           check_table("of_gpu_host", SIZE_OF(host->gpu)) == OF_OK &&
           check_table("of_scaling_host", SIZE_OF(host->scaling)) == OF_OK &&
           check_table("of_external_host", SIZE_OF(host->external)) == OF_OK &&
           check_table("of_await_host", SIZE_OF(host->await)) == OF_OK &&
           check_table("of_product_host", SIZE_OF(host->product)) == OF_OK;
}

/* The first with a function that is not optional and NULL; or NULL. */
static const char *table_with_a_hole(const of_host *h) {
    const of_backward_host *b = h->backward;
    const of_gpu_host *g = h->gpu;
    const of_scaling_host *s = h->scaling;
    if (!h->collect || !h->commit || !h->defer || !h->settle || !h->release || !h->drop ||
        !h->parallel_for)
        return "of_host";
    if (b && (!b->begin || !b->measure || !b->make_state))
        return "of_backward_host";
    if (g && (!g->current || !g->count || !g->launch || !g->record || !g->wait || !g->is_done ||
              !g->synchronize || !g->destroy))
        return "of_gpu_host";
    if (s && (!s->collect || !s->defer || !s->settle || !s->is_alive || !s->keep ||
              (g && !s->share_factor)))
        return "of_scaling_host";
    if (h->await && (!h->await->has_arrived || !h->await->await))
        return "of_await_host";
    if (h->product && (!h->product->begin || !h->product->rows || !h->product->end))
        return "of_product_host";
    return h->external && !h->external->apply ? "of_external_host" : NULL;
}

static of_status check_host(const of_host *host) {
    if (host->abi_version != OF_ABI_VERSION)
        return of_fail(OF_INVALID, "the host was built for ABI version %u, this library has %d",
                       (unsigned)host->abi_version, (int)OF_ABI_VERSION);
    if (!sizes_fit(host))
        return OF_INVALID;
    const char *table = table_with_a_hole(host);
    if (table)
        return of_fail(OF_INVALID, "a function of the host's %s that is not optional is NULL",
                       table);
    return OF_OK;
}

static of_status check_options(const of_plan_options *options) {
    if (options->struct_size < sizeof *options)
        return of_fail(OF_INVALID, "of_plan_options has %u bytes, this library needs %zu",
                       (unsigned)options->struct_size, sizeof *options);
    if ((unsigned)options->mode > OF_FINAL || (unsigned)options->reference >= OF_REF_COUNT ||
        (unsigned)options->isa >= OF_ISA_COUNT)
        return of_fail(OF_INVALID, "of_plan_options has an unknown mode, reference or ISA");
    if (options->reference >= OF_REF_CUDA_FUSED) /* their rows take other scalars */
        return of_fail(OF_INVALID, "the reference of a plan is one of the CPU's; what is on a "
                                   "GPU always has the one that its rule has there");
    return OF_OK;
}

static const of_rule *find_rule(const char *name) {
    const of_rule *rule = name ? of_rule_find(name) : NULL;
    if (rule)
        return rule;
    char known[256] = "";
    for (const of_rule *r = of_rules; r->name; r++) {
        size_t length = strlen(known);
        snprintf(known + length, sizeof known - length, "%s%s", length ? ", " : "", r->name);
    }
    of_set_error("unknown rule '%s'; known: %s", name ? name : "(null)", known);
    return NULL;
}

/* In a backward pass on a CPU: enough for several threads, and with gradients and state
 * about what the own caches of two cores hold. */
static const size_t together_bytes = (size_t)512 << 10;

static size_t bucket_bytes(const of_plan_options *options, of_device device) {
    const size_t asked = options->bucket_bytes[device];
    if (asked)
        return asked == OF_BUCKET_NONE ? 0 : asked;
    return options->mode != OF_FORWARD && device == OF_CPU ? together_bytes
                                                           : default_bucket_bytes[device];
}

static void choose(of_plan *plan, const of_plan_options *options) {
    plan->mode = options->mode;
    plan->reference = options->reference;
    plan->isa = options->isa;
    plan->passes_a_step = options->passes;
    /* An update that is large enough for all threads waits only if the user says so. */
    plan->large = options->bucket_bytes[OF_CPU] ? INT64_MAX : OF_SERIAL_ELEMENTS;
    plan->vector_bytes = options->vector_bytes ? options->vector_bytes : 32;
    for (int device = OF_CPU; device <= OF_CUDA; device++)
        plan->bucket_bytes[device] = bucket_bytes(options, (of_device)device);
    plan->program_rule = of_rule_find("programs");
    for (int dtype = 0; dtype < OF_DTYPE_COUNT; dtype++) {
        plan->kernels[dtype] = of_kernel_find(plan->rule->name, options->reference, (of_dtype)dtype,
                                              OF_CPU, options->isa);
        plan->programs[dtype] = of_kernel_find("programs", options->reference, (of_dtype)dtype,
                                               OF_CPU, options->isa);
    }
}

of_status of_plan_create(const of_host *host, const char *rule, const of_plan_options *options,
                         of_plan **out) {
    of_plan_options defaults = {.struct_size = sizeof defaults, .isa = of_isa_detect()};
    *out = NULL;
    if (!options)
        options = &defaults;
    if (check_host(host) != OF_OK || check_options(options) != OF_OK)
        return OF_INVALID;
    const of_rule *found = find_rule(rule);
    if (!found)
        return OF_INVALID;
    if (options->mode != OF_FORWARD && !host->backward)
        return of_fail(OF_INVALID, "backward passes need a host with an of_backward_host");
    of_plan *plan = calloc(1, sizeof *plan);
    if (!plan)
        return of_fail(OF_NO_MEMORY, "out of memory for a plan");
    plan->host = *host;
    plan->settle[OF_UPDATES] = host->settle;
    plan->settle[OF_SCALINGS] = host->scaling ? host->scaling->settle : NULL;
    plan->unseal[OF_UPDATES] = host->unseal;
    plan->unseal[OF_SCALINGS] = host->scaling ? host->scaling->unseal : NULL;
    plan->rule = found;
    choose(plan, options);
    of_store_policy_init(&plan->store_policy);
    atomic_init(&plan->users, 1);
    atomic_init(&plan->refs, 1);
    pthread_rwlock_init(&plan->layout, NULL);
    pthread_mutex_init(&plan->lock, NULL);
    of_plans_add(plan);
    static const char *const modes[] = {"forward", "backward", "final backward"};
    of_log(host, OF_LOG_INFO, "plan for %s, %s fusion, float32 kernel %s", found->name,
           modes[plan->mode], of_plan_isa(plan, OF_FLOAT32));
    *out = plan;
    return OF_OK;
}

/* Updates whose gradient will never come are dropped, and the plan has failed. */
static void drop_missing(of_plan *plan, of_list *done) {
    if (!plan->pending[OF_UPDATES].first)
        return;
    of_plan_fail(plan);
    of_discard_pending(plan, done);
}

/* Launches what is pending and drops every slot and group. False: something may still be
 * in flight. */
static bool empty(of_plan *plan) {
    of_list done = {0};
    of_await_pending(plan);
    of_launch_readers(plan);
    pthread_rwlock_wrlock(&plan->layout);
    pthread_mutex_lock(&plan->lock);
    of_passes_forget(plan);
    if (OF_GUARD(clear))
        of_launch_pending(plan, OF_UPDATES, &done);
    else
        of_discard_pending(plan, &done);
    drop_missing(plan, &done);
    of_launch_pending(plan, OF_SCALINGS, &done);
    of_count_steps(plan);
    of_queues_let_go(plan, &done);
    const bool drained = of_queues_drain(plan);
    of_slot *slots = plan->slots;
    size_t n_slots = plan->n_slots;
    free(plan->groups);
    plan->slots = NULL;
    plan->groups = NULL;
    plan->n_slots = plan->slots_capacity = plan->n_groups = plan->n_updated = 0;
    pthread_mutex_unlock(&plan->lock);
    pthread_rwlock_unlock(&plan->layout);
    of_updates_release(plan, &done);
    for (size_t i = 0; i < n_slots; i++) {
        if (slots[i].own)
            of_update_drop(slots[i].own);
        plan->host.drop(plan->host.ctx, slots[i].tensor);
    }
    free(slots);
    return drained;
}

void of_plan_clear(of_plan *plan) {
    empty(plan);
}

void of_plan_retain(of_plan *plan) {
    of_retain(&plan->users);
}

/* Nothing is pending or in flight any more when the users' common reference goes, so
 * of_access() never finds a plan that is being freed. */
void of_plan_release(of_plan *plan) {
    if (!plan || !of_was_last(&plan->users))
        return;
    if (empty(plan))
        of_plan_unref(plan);
}

static of_status put_group(of_plan *plan, size_t index, const double *hyper) {
    if (index > plan->n_groups)
        return of_fail(OF_INVALID, "group %zu: the plan has %zu groups, the next is %zu", index,
                       plan->n_groups, plan->n_groups);
    if (index == plan->n_groups) {
        of_group *groups = realloc(plan->groups, (index + 1) * sizeof *groups);
        if (!groups)
            return of_fail(OF_NO_MEMORY, "out of memory for a parameter group");
        plan->groups = groups;
        plan->n_groups++;
    }
    of_group *group = &plan->groups[index];
    if (plan->rule->n_hyper > 0) /* else it may be NULL, which memcpy() does not take */
        memcpy(group->hyper, hyper, plan->rule->n_hyper * sizeof *hyper);
    group->used = plan->rule->state_used(group->hyper);
    group->prepared[OF_CPU].step = group->prepared[OF_CUDA].step = 0;
    return OF_OK;
}

of_status of_plan_set_group(of_plan *plan, size_t group, const double *hyper, size_t n_hyper) {
    if (n_hyper != plan->rule->n_hyper)
        return of_fail(OF_INVALID, "%s has %zu hyper-parameters, not %zu", plan->rule->name,
                       plan->rule->n_hyper, n_hyper);
    pthread_rwlock_wrlock(&plan->layout);
    of_status status = put_group(plan, group, hyper);
    pthread_rwlock_unlock(&plan->layout);
    return status;
}

void of_plan_get_group(of_plan *plan, size_t group, double *hyper) {
    const size_t bytes = plan->rule->n_hyper * sizeof *hyper;
    pthread_rwlock_rdlock(&plan->layout);
    if (group < plan->n_groups)
        memcpy(hyper, plan->groups[group].hyper, bytes);
    else
        memset(hyper, 0, bytes);
    pthread_rwlock_unlock(&plan->layout);
}

/* Threads that hold plan->lock alone read slots, too. */
static bool make_room(of_plan *plan) {
    size_t capacity = plan->slots_capacity ? plan->slots_capacity * 2 : 16;
    pthread_mutex_lock(&plan->lock);
    of_slot *slots = realloc(plan->slots, capacity * sizeof *slots);
    if (slots) {
        plan->slots = slots;
        plan->slots_capacity = capacity;
    }
    pthread_mutex_unlock(&plan->lock);
    return slots != NULL;
}

static of_status put_slot(of_plan *plan, const of_slot *slot) {
    if (slot->group >= plan->n_groups)
        return of_fail(OF_INVALID, "a slot for group %zu: the plan has %zu groups", slot->group,
                       plan->n_groups);
    if (plan->n_slots == plan->slots_capacity && !make_room(plan))
        return of_fail(OF_NO_MEMORY, "out of memory for a slot");
    plan->slots[plan->n_slots++] = *slot;
    return OF_OK;
}

of_status of_plan_add_slot(of_plan *plan, void *tensor, size_t group, bool eager,
                           size_t *slot_out) {
    of_slot slot = {.tensor = tensor, .group = group, .eager = eager};
    pthread_rwlock_wrlock(&plan->layout);
    of_status status = put_slot(plan, &slot);
    size_t index = plan->n_slots - 1;
    pthread_rwlock_unlock(&plan->layout);
    if (status != OF_OK)
        plan->host.drop(plan->host.ctx, tensor);
    else if (slot_out)
        *slot_out = index;
    return status;
}

const of_rule *of_plan_rule(const of_plan *plan) {
    return plan->rule;
}

const double *of_plan_hyper(const of_plan *plan, size_t slot) {
    return plan->groups[plan->slots[slot].group].hyper;
}

unsigned of_plan_state_used(const of_plan *plan, size_t slot) {
    return plan->groups[plan->slots[slot].group].used;
}

void of_plan_stop_deferring(of_plan *plan) {
    pthread_mutex_lock(&plan->lock);
    plan->stopped = true;
    pthread_mutex_unlock(&plan->lock);
}

void of_plan_counts(of_plan *plan, of_counts *out) {
    pthread_mutex_lock(&plan->lock);
    *out = plan->counts;
    out->pending = plan->pending[OF_UPDATES].count;
    out->past_caches = of_goes_past_caches_now(plan);
    if (plan->mode == OF_FORWARD)
        out->in_step = out->at_once;
    out->in_flight = 0;
    for (size_t i = 0; i < plan->n_queues; i++)
        out->in_flight += plan->queues[i].count;
    pthread_mutex_unlock(&plan->lock);
}

const char *of_plan_isa(const of_plan *plan, of_dtype dtype) {
    bool has_one = (unsigned)dtype < OF_DTYPE_COUNT && plan->kernels[dtype];
    return has_one ? of_isa_name(plan->kernels[dtype]->isa) : "none";
}
