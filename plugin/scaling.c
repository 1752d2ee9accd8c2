/* SPDX-License-Identifier: BSD-3-Clause */
/* scaling.c: gradients that are still to be multiplied, by clipping or by
 * unscaling a loss.
 *
 * A scaling is the second kind of what can be pending on memory: a record like an
 * update's, in a list and a table of keys of its own, beside whatever update is
 * pending on the same memory. An update that is created meanwhile copies the
 * factors and multiplies what it reads; the scaling itself stays pending, for
 * the gradient may still be looked at, and ends with it.
 *
 * On a device it belongs to the stream where its factor was computed, and is
 * launched there however late. Only updates of that stream apply the factor
 * themselves, so that what they read of the gradient comes before the launch. */
#include "scale.h"

#include <string.h>

#include "internal.h"

/* A gradient that no longer exists is not multiplied. */
static void prepare(of_plan *plan, of_update *scaling) {
    if (!scaling->deferred || plan->host.scaling->keep(plan->host.ctx, scaling->in.references))
        return;
    scaling->gone = true;
    scaling->in.numel = 0;
}

static void multiply(const of_update *scaling, size_t begin, size_t end, bool past_caches) {
    char *gradient = (char *)scaling->in.param + begin * of_dtype_size(scaling->in.dtype);
    (void)past_caches;
    scaling->scale(gradient, gradient, end - begin, scaling->factors);
}

/* On a device a launch is expensive. So the first look at one gradient multiplies the others of
 * its stream, too: they are likely to be looked at next, and stock multiplies all at once. */
static void launch_with_others(of_plan *plan, of_update *first, of_list *done) {
    of_list bucket = {0};
    if (first->in.device == OF_CPU) {
        of_launch_one(plan, first, OF_AT_USE, done);
        return;
    }
    for (of_update *u = plan->pending[OF_SCALINGS].first, *next; u; u = next) {
        next = u->next;
        if (u != first && (u->in.device == OF_CPU || atomic_load(&u->readers) ||
                           !of_stream_equal(&u->in.stream, &first->in.stream)))
            continue;
        prepare(plan, u);
        of_list_remove(&plan->pending[OF_SCALINGS], u);
        of_list_append(&bucket, u);
    }
    of_launch(plan, &bucket, OF_AT_USE, done);
}

static const of_kind scaling_kind = {.index = OF_SCALINGS,
                                     .gpu_rule = "scaling",
                                     .prepare = prepare,
                                     .run = multiply,
                                     .use = launch_with_others};

/* The scaling of this gradient, pending or in flight, with its plan's lock held and
 * a reference to it; or NULL. */
static of_update *lock_scaling(const void *key) {
    of_update *scaling = of_any_scaled() ? of_registry_find(OF_SCALINGS, key) : NULL;
    if (!scaling)
        return NULL;
    pthread_mutex_lock(&scaling->plan->lock);
    if ((scaling->pending || scaling->in_flight) && scaling->kind == &scaling_kind &&
        scaling->in.keys[0] == key)
        return scaling;
    pthread_mutex_unlock(&scaling->plan->lock);
    of_plan_unref(scaling->plan);
    return NULL;
}

static void unlock_scaling(of_update *scaling) {
    of_plan *plan = scaling->plan;
    pthread_mutex_unlock(&plan->lock);
    of_plan_unref(plan);
}

bool of_scaling_fits(const void *key, const of_stream *ready) {
    of_update *scaling = lock_scaling(key);
    if (!scaling)
        return true;
    const bool fits = of_stream_equal(&scaling->in.stream, ready) || !OF_GUARD(clipstream);
    unlock_scaling(scaling);
    return fits;
}

void of_scaling_share(of_plan *plan, of_update *update) {
    of_update *scaling = lock_scaling(update->in.grad_key);
    if (!scaling)
        return;
    if (scaling->pending && of_stream_equal(&scaling->in.stream, &update->in.ready) &&
        OF_GUARD(factors)) {
        update->in.factor_at = scaling->in.factor_at;
        atomic_fetch_add(&scaling->readers, 1);
        plan->host.scaling->share_factor(plan->host.ctx, update->in.references,
                                         scaling->in.references);
    }
    unlock_scaling(scaling);
}

/* A gradient with a scaling of this plan and a pending update of another one, which is
 * going to multiply what it reads by itself; or NULL. An update in flight does so on the
 * scaling's own stream, and comes first anyway. */
static const void *find_read(of_plan *plan) {
    const void *found = NULL;
    pthread_mutex_lock(&plan->lock);
    for (of_update *u = plan->pending[OF_SCALINGS].first; u && !found; u = u->next)
        if (of_registry_waits_elsewhere(u->in.keys[0], plan))
            found = u->in.keys[0];
    pthread_mutex_unlock(&plan->lock);
    return found;
}

void of_launch_readers(of_plan *plan) {
    const void *key = find_read(plan);
    while (key && of_launch_at(key, false) != OF_ACCESS_FAILED)
        key = find_read(plan);
}

void of_plan_sweep(of_plan *plan) {
    of_list gone = {0};
    pthread_mutex_lock(&plan->lock);
    for (of_update *u = plan->pending[OF_SCALINGS].first, *next; u; u = next) {
        next = u->next;
        if (!plan->host.scaling->is_alive(plan->host.ctx, u->in.references))
            of_launch_one(plan, u, OF_AT_CLOSE, &gone);
    }
    pthread_mutex_unlock(&plan->lock);
    of_updates_release(plan, &gone);
}

/* Leaves it pending, or does it now where others may see the memory. */
static void create(of_plan *plan, of_update *scaling, of_list *done) {
    const void *key = scaling->in.keys[0];
    of_update *own = NULL;
    scaling->in.n_keys = 1;
    scaling->scale = of_scale_find(scaling->in.dtype, plan->isa);
    memset(scaling->scalars, 0, sizeof scaling->scalars); /* those on devices are compared */
    of_registry_take(OF_SCALINGS, key);                   /* one in flight is waited for by now */
    if (!plan->stopped && of_registry_add(scaling, 1, &key, &own) == OF_ADDED) {
        if (plan->host.scaling->defer(plan->host.ctx, scaling->in.references)) {
            scaling->pending = scaling->deferred = true;
            of_list_append(&plan->pending[OF_SCALINGS], scaling);
            return;
        }
    }
    of_launch_one(plan, scaling, OF_AT_ONCE, done);
}

/* Where nothing may wait, a device's host multiplies all gradients in few launches. */
static bool may_defer(of_plan *plan) {
    pthread_mutex_lock(&plan->lock);
    const bool may = !plan->stopped;
    pthread_mutex_unlock(&plan->lock);
    return may;
}

static of_status scale_slot(of_plan *plan, size_t slot, double factor, float norm, of_list *done,
                            bool *scaled) {
    pthread_mutex_lock(&plan->lock);
    of_update *update = of_pool_take(plan);
    pthread_mutex_unlock(&plan->lock);
    if (!update)
        return OF_NO_MEMORY;
    update->in = (of_inputs){0};
    of_update_clear(update);
    update->slot = slot;
    update->kind = &scaling_kind;
    void *tensor = plan->slots[slot].tensor;
    of_found found = plan->host.scaling->collect(plan->host.ctx, tensor, &update->in);
    *scaled = found == OF_FOUND_INPUTS;
    if (!*scaled) {
        of_pool_give(plan, update);
        return found == OF_FOUND_ERROR ? OF_INVALID : OF_OK;
    }
    *scaled = update->in.device == OF_CPU || may_defer(plan);
    if (!*scaled || of_registry_add_factor(update->in.keys[0], factor)) {
        of_list_append(done, update);
        return OF_OK;
    }
    /* The scaling that is pending has no room for the factor, or there is none. */
    if (of_multiply_at(update->in.keys[0], false) == OF_ACCESS_FAILED) {
        of_list_append(done, update);
        return OF_REFUSED;
    }
    update->factors[0] = update->in.device == OF_CPU ? factor : 1.0;
    update->n_factors = 1;
    update->norm = norm;
    pthread_mutex_lock(&plan->lock);
    create(plan, update, done);
    const of_status status = of_plan_health(plan);
    pthread_mutex_unlock(&plan->lock);
    return status;
}

of_status of_plan_scale(of_plan *plan, size_t slot, double factor, float norm, bool *scaled) {
    of_list done = {0};
    *scaled = false;
    if (!plan->host.scaling)
        return of_fail(OF_INVALID, "this host has no functions for scalings of gradients");
    pthread_rwlock_rdlock(&plan->layout);
    of_status status = of_check_slot(plan, slot);
    if (status == OF_OK)
        status = scale_slot(plan, slot, factor, norm, &done, scaled);
    pthread_rwlock_unlock(&plan->layout);
    of_updates_release(plan, &done);
    return status;
}
