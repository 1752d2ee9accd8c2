/* SPDX-License-Identifier: BSD-3-Clause */
/* scale.c: gradients that are still to be multiplied, by clipping or by
 * unscaling a loss.
 *
 * A scaling is an update of the gradient's memory, and is pending like one. It
 * is entered in the registry under a key of its own, beside whatever update is
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

const void *of_scale_key(const void *key) {
    return key ? (const char *)key + 1 : NULL;
}

/* A gradient that is gone is not multiplied any more. */
void of_scaling_prepare(of_plan *plan, of_update *scaling) {
    if (scaling->deferred && !plan->host.keep(plan->host.ctx, scaling->in.hold))
        scaling->in.numel = 0;
}

/* The scaling of this gradient, pending or in flight, with its plan's lock held and
 * a reference to it; or NULL. */
static of_update *lock_scaling(const void *key) {
    of_update *scaling = key && of_registry_has_scalings() ? of_registry_find(key) : NULL;
    if (!scaling)
        return NULL;
    pthread_mutex_lock(&scaling->plan->lock);
    if ((scaling->pending || scaling->flying) && scaling->in.keys[0] == key)
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
    of_update *scaling = lock_scaling(of_scale_key(key));
    if (!scaling)
        return true;
    const bool fits = of_stream_equal(&scaling->in.stream, ready) || !OF_GUARD(clipstream);
    unlock_scaling(scaling);
    return fits;
}

void of_scaling_share(of_plan *plan, of_update *update) {
    of_update *scaling = lock_scaling(of_scale_key(update->in.grad_key));
    if (!scaling)
        return;
    if (scaling->pending && of_stream_equal(&scaling->in.stream, &update->in.ready) &&
        OF_GUARD(factors)) {
        update->in.factor_at = scaling->in.factor_at;
        scaling->reader = update;
        plan->host.share_factor(plan->host.ctx, update->in.hold, scaling->in.hold);
    }
    unlock_scaling(scaling);
}

/* A gradient with a scaling of this plan and a pending update of another one, which is
 * going to multiply what it reads by itself; or NULL. An update in flight does so on the
 * scaling's own stream, and comes first anyway. */
static const void *find_read(of_plan *plan) {
    const void *found = NULL;
    pthread_mutex_lock(&plan->lock);
    for (of_update *u = plan->scalings.first; u && !found; u = u->next) {
        const void *key = (const char *)u->in.keys[0] - 1; /* see of_scale_key() */
        found = of_registry_waits_elsewhere(key, plan) ? key : NULL;
    }
    pthread_mutex_unlock(&plan->lock);
    return found;
}

void of_launch_readers(of_plan *plan) {
    const void *key = find_read(plan);
    while (key && of_launch_at(key, false) != OF_TOUCH_FAILED)
        key = find_read(plan);
}

void of_launch_scalings(of_plan *plan, of_list *done) {
    for (of_update *u = plan->scalings.first; u; u = u->next)
        of_scaling_prepare(plan, u);
    of_launch(plan, &plan->scalings, OF_AT_CLOSE, done);
}

/* Whether nothing that reads the gradient has to come before. Who was given the factor
 * may not even be registered yet. */
static bool has_no_reader(const of_update *u) {
    return !u->reader || of_registry_flies((const char *)u->in.keys[0] - 1, u->reader);
}

/* On a device, where a launch is dear, whoever looks at one gradient has the others of
 * its stream multiplied too: as stock does at once, and likely to be looked at next. */
void of_launch_scalings_with(of_plan *plan, of_update *first, of_list *done) {
    of_list bucket = {0};
    if (first->in.device == OF_CPU) {
        of_launch_one(plan, first, OF_AT_USE, done);
        return;
    }
    for (of_update *u = plan->scalings.first, *next; u; u = next) {
        next = u->next;
        if (u != first && (u->in.device == OF_CPU || !has_no_reader(u) ||
                           !of_stream_equal(&u->in.stream, &first->in.stream)))
            continue;
        of_scaling_prepare(plan, u);
        of_list_remove(&plan->scalings, u);
        of_list_append(&bucket, u);
    }
    of_launch(plan, &bucket, OF_AT_USE, done);
}

void of_plan_sweep(of_plan *plan) {
    of_list gone = {0};
    pthread_mutex_lock(&plan->lock);
    for (of_update *u = plan->scalings.first, *next; u; u = next) {
        next = u->next;
        if (!plan->host.is_alive(plan->host.ctx, u->in.hold))
            of_launch_one(plan, u, OF_AT_CLOSE, &gone);
    }
    pthread_mutex_unlock(&plan->lock);
    of_updates_release(plan, &gone);
}

/* Leaves it pending, or does it now where others may see the memory. */
static void create_scaling(of_plan *plan, of_update *update, of_list *done) {
    const void *key = NULL;
    of_update *own = NULL;
    update->scaling = true;
    update->in.keys[0] = of_scale_key(update->in.keys[0]);
    update->in.n_keys = 1;
    update->scale = of_scale_find(update->in.dtype, plan->isa);
    memset(update->scalars, 0, sizeof update->scalars); /* those on devices are compared */
    of_registry_take(update->in.keys[0]);               /* one in flight is waited for by now */
    if (!plan->stopped && of_registry_add(update, 1, &key, &own) == OF_ADDED) {
        if (plan->host.defer(plan->host.ctx, update->in.hold)) {
            update->pending = update->deferred = true;
            of_list_append(&plan->scalings, update);
            return;
        }
    }
    of_launch_one(plan, update, OF_AT_ONCE, done);
}

/* Where nothing may wait, a device's host multiplies all gradients in few launches. */
static bool may_defer(of_plan *plan) {
    pthread_mutex_lock(&plan->lock);
    const bool may = !plan->stopped;
    pthread_mutex_unlock(&plan->lock);
    return may;
}

static of_status scale_slot(of_plan *plan, of_update *update, double factor, float norm,
                            of_list *done, bool *scaled) {
    of_inputs_clear(update);
    void *tensor = plan->slots[update->slot].tensor;
    of_found found = plan->host.collect_gradient(plan->host.ctx, tensor, &update->in);
    *scaled = found == OF_FOUND_INPUTS;
    if (!*scaled) {
        of_pool_give(plan, update);
        return found == OF_FOUND_ERROR ? OF_INVALID : OF_OK;
    }
    *scaled = update->in.device == OF_CPU || may_defer(plan);
    if (!*scaled || of_registry_add_factor(of_scale_key(update->in.keys[0]), factor)) {
        of_list_append(done, update);
        return OF_OK;
    }
    /* It has all factors it can take. */
    if (of_launch_at(of_scale_key(update->in.keys[0]), false) == OF_TOUCH_FAILED) {
        of_list_append(done, update);
        return OF_REFUSED;
    }
    update->factors[0] = update->in.device == OF_CPU ? factor : 1.0;
    update->n_factors = 1;
    update->norm = norm;
    pthread_mutex_lock(&plan->lock);
    create_scaling(plan, update, done);
    const of_status status = of_plan_health(plan);
    pthread_mutex_unlock(&plan->lock);
    return status;
}

of_status of_plan_scale(of_plan *plan, size_t slot, double factor, float norm, bool *scaled) {
    of_list done = {0};
    *scaled = false;
    if (!plan->host.collect_gradient)
        return of_fail(OF_INVALID, "this host has no collect_gradient()");
    pthread_rwlock_rdlock(&plan->layout);
    of_update *update = NULL;
    of_status status = of_take_for_slot(plan, slot, &update);
    if (update)
        status = scale_slot(plan, update, factor, norm, &done, scaled);
    pthread_rwlock_unlock(&plan->layout);
    of_updates_release(plan, &done);
    return status;
}

unsigned of_scale_factors(const void *key, double factors[2], float *norm) {
    return of_registry_factors(of_scale_key(key), factors, norm);
}

bool of_is_scaled(const void *key) {
    double factors[OF_MAX_FACTORS];
    float norm;
    return of_registry_has_scalings() && of_scale_factors(key, factors, &norm) != 0;
}
