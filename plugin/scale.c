/* SPDX-License-Identifier: BSD-3-Clause */
/* scale.c: gradients that are still to be multiplied, by clipping or by
 * unscaling a loss.
 *
 * A scaling is an update of the gradient's memory, and is pending like one. It
 * is entered in the registry under a key of its own, beside whatever update is
 * pending on the same memory. An update that is created meanwhile copies the
 * factors and multiplies what it reads; the scaling itself stays pending, for
 * the gradient may still be looked at, and ends with it. */
#include "scale.h"
#include "internal.h"

const void *of_scale_key(const void *key) {
    return key ? (const char *)key + 1 : NULL;
}

/* A gradient that is gone is not multiplied any more. */
void of_scaling_prepare(of_plan *plan, of_update *scaling) {
    if (scaling->deferred && !plan->host.keep(plan->host.ctx, scaling->in.hold))
        scaling->in.numel = 0;
}

/* The plan, another one, of an update that is pending on the gradient of a scaling (*key)
 * and is going to multiply what it reads by itself; or NULL. Lock held. */
static of_plan *find_reader(of_plan *plan, const void **key) {
    for (of_update *u = plan->scalings.first; u; u = u->next) {
        *key = (const char *)u->in.keys[0] - 1; /* see of_scale_key() */
        of_update *reader = of_registry_find(*key);
        if (reader && reader->plan != plan)
            return reader->plan;
        if (reader)
            of_plan_unref(plan);
    }
    return NULL;
}

void of_launch_readers(of_plan *plan) {
    for (bool more = true; more;) {
        const void *key = NULL;
        pthread_mutex_lock(&plan->lock);
        of_plan *other = find_reader(plan, &key);
        pthread_mutex_unlock(&plan->lock);
        more = other && of_launch_at(key, false) != OF_TOUCH_FAILED;
        if (other)
            of_plan_unref(other);
    }
}

void of_launch_scalings(of_plan *plan, of_list *done) {
    for (of_update *u = plan->scalings.first; u; u = u->next)
        of_scaling_prepare(plan, u);
    of_launch(plan, &plan->scalings, OF_AT_CLOSE, done);
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
    if (!plan->stopped && of_registry_add(update, 1, &key, &own) == OF_ADDED) {
        if (plan->host.defer(plan->host.ctx, update->in.hold)) {
            update->pending = update->deferred = true;
            of_list_append(&plan->scalings, update);
            return;
        }
    }
    of_launch_one(plan, update, OF_AT_ONCE, done);
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
    if (of_registry_add_factor(of_scale_key(update->in.keys[0]), factor)) {
        of_list_append(done, update);
        return OF_OK;
    }
    of_launch_at(of_scale_key(update->in.keys[0]), false); /* it has all factors it can take */
    update->factors[0] = factor;
    update->n_factors = 1;
    update->norm = norm;
    pthread_mutex_lock(&plan->lock);
    create_scaling(plan, update, done);
    pthread_mutex_unlock(&plan->lock);
    return OF_OK;
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
