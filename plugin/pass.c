/* SPDX-License-Identifier: BSD-3-Clause */
/* pass.c: backward passes. Whoever completes gradients says in which pass. This file decides
 * which passes only add to the gradients, which gradients wait for each other, and when the
 * gradients of a pass are used together.
 *
 * A small gradient waits before its update is created, so that everything is as before step()
 * in stock until then. Those of one stream wait for each other: where their updates are
 * created, that stream is the current one. A pass takes its own gradients only: what another
 * thread's pass has made is not complete for this one. */
#include <stdlib.h>

#include "internal.h"

/* Lock held, up to of_pass_begin(). */

static of_pass *find(const of_plan *plan, of_token token) {
    of_pass *pass = plan->passes;
    while (pass && pass->token != token)
        pass = pass->next;
    return pass;
}

static of_pass *make(of_plan *plan, of_token token) {
    of_pass *pass = plan->spare_pass;
    of_waiting *waiting = pass ? pass->waiting : NULL;
    plan->spare_pass = NULL;
    if (!pass && !(pass = malloc(sizeof *pass)))
        return NULL;
    plan->n_passes++;
    const bool is_marked = plan->add_only > 0;
    *pass = (of_pass){.plan = plan,
                      .token = token,
                      .only_adds = is_marked || plan->n_passes < plan->passes_a_step,
                      .is_marked = is_marked,
                      .next = plan->passes,
                      .waiting = waiting};
    atomic_init(&pass->refs, 1);
    of_retain(&plan->refs);
    plan->passes = pass;
    return pass;
}

static of_batch take(const of_plan *plan, of_waiting *waiting) {
    of_batch batch = waiting->batch;
    waiting->batch = (of_batch){0};
    waiting->bytes = 0;
    for (size_t i = 0; i < batch.n; i++)
        plan->slots[batch.slots[i]].waits_in = NULL;
    return batch;
}

/* Those of the stream, or others that are none now. NULL: no memory. */
static of_waiting *wait_on(of_pass *pass, const of_stream *stream) {
    of_waiting *waiting = pass->waiting, *empty = NULL;
    for (; waiting && !of_stream_equal(&waiting->on, stream); waiting = waiting->next)
        if (!waiting->batch.n)
            empty = waiting;
    if (!waiting)
        waiting = empty;
    if (!waiting && (waiting = calloc(1, sizeof *waiting))) {
        waiting->next = pass->waiting;
        pass->waiting = waiting;
    }
    if (waiting)
        waiting->on = *stream;
    return waiting;
}

static void give_back(of_plan *plan, of_batch *batch) {
    batch->n = 0;
    if (plan->spare_batch.slots)
        free(batch->slots);
    else
        plan->spare_batch = *batch;
}

static void leave(of_pass *pass, bool abandoned) {
    of_pass **at = &pass->plan->passes;
    while (*at && *at != pass)
        at = &(*at)->next;
    if (*at)
        *at = pass->next;
    pass->over = true;
    pass->abandoned = abandoned;
}

static void drop_waiting(of_pass *pass) {
    for (of_waiting *waiting = pass->waiting; waiting; waiting = waiting->next) {
        of_batch batch = take(pass->plan, waiting);
        give_back(pass->plan, &batch);
    }
}

void of_passes_forget(of_plan *plan) {
    for (of_pass *pass = plan->passes; pass; pass = pass->next)
        drop_waiting(pass);
}

static bool append(of_plan *plan, of_batch *batch, size_t slot) {
    if (!batch->slots) {
        *batch = plan->spare_batch;
        plan->spare_batch = (of_batch){0};
    }
    if (batch->n == batch->capacity) {
        const size_t capacity = batch->capacity ? batch->capacity * 2 : 32;
        size_t *slots = realloc(batch->slots, 2 * capacity * sizeof *slots);
        if (!slots)
            return false;
        batch->slots = slots;
        batch->capacity = capacity;
    }
    batch->slots[batch->n++] = slot;
    return true;
}

/* Both gradients of the slot are left to step(), that of this pass and that which waits. */
static void remove_from(of_plan *plan, of_waiting *waiting, size_t slot) {
    of_batch *batch = &waiting->batch;
    size_t i = 0;
    while (batch->slots[i] != slot)
        i++;
    for (batch->n--; i < batch->n; i++)
        batch->slots[i] = batch->slots[i + 1];
    plan->slots[slot].waits_in = NULL;
}

/* Whether this gradient's update runs now and by itself. Else the gradient waits, or is left to
 * step(); *batch: the gradients whose updates run now, together. A large gradient takes those
 * along that wait: their memory lies beside its own, and would keep the next large gradient
 * from memory that is still in the cache. */
static bool goes_by_itself(of_pass *pass, size_t number, of_batch *batch) {
    of_plan *plan = pass->plan;
    of_slot *slot = &plan->slots[number];
    of_stream on = OF_NO_STREAM;
    int64_t numel = 0;
    size_t bytes = 0;
    if (slot->updated || pass->over)
        return true;
    if (slot->waits_in) {
        remove_from(plan, slot->waits_in, number);
        return false;
    }
    const of_device device =
        plan->host.backward->measure(plan->host.ctx, slot->tensor, &numel, &bytes, &on);
    of_waiting *waiting = wait_on(pass, &on);
    if (!waiting || !append(plan, &waiting->batch, number))
        return true;
    slot->waits_in = waiting;
    waiting->bytes += bytes;
    const bool is_small = of_waits_for_others(plan, device, bytes, numel);
    if (!is_small || waiting->bytes >= plan->bucket_bytes[device])
        *batch = take(plan, waiting);
    return false;
}

/* A gradient that is only added to after its parameter's update would be used by the step()
 * after the next one; stock uses it in the next. */
static of_status check_ready(const of_pass *pass, size_t slot) {
    const of_plan *plan = pass->plan;
    const of_status status = of_check_slot(plan, slot);
    if (status == OF_OK && pass->only_adds && plan->slots[slot].updated && OF_GUARD(added_late))
        return of_fail(OF_TWICE, "a backward pass that only adds to the gradients came after the "
                                 "one that updated this parameter; call step() first, or use "
                                 "optfuse.fuse(optimizer, mode=\"forward\")");
    return status;
}

/* From here on the functions of optfuse.h. */

static of_status check_begin(const of_plan *plan, of_token token) {
    if (plan->mode == OF_FORWARD)
        return of_fail(OF_INVALID, "of_pass_begin() is for backward and final mode");
    if (token == OF_NO_TOKEN)
        return of_fail(OF_INVALID, "a gradient was completed outside of every backward pass");
    return OF_OK;
}

/* Every thread that gets the pass before the host has agreed asks the host. */
static bool begins(of_pass *pass, bool *first) {
    of_plan *plan = pass->plan;
    if (!pass->is_marked && !plan->host.backward->begin(plan->host.ctx, pass->only_adds))
        return false;
    pthread_mutex_lock(&plan->lock);
    *first = !pass->begun;
    pass->begun = true;
    pthread_mutex_unlock(&plan->lock);
    return true;
}

of_status of_pass_begin(of_plan *plan, of_token token, of_pass **out, bool *first) {
    *out = NULL;
    *first = false;
    const of_status status = check_begin(plan, token);
    if (status != OF_OK)
        return status;
    pthread_mutex_lock(&plan->lock);
    of_pass *pass = find(plan, token);
    if (!pass || !of_try_retain(&pass->refs))
        pass = make(plan, token);
    const bool begun = pass && pass->begun;
    pthread_mutex_unlock(&plan->lock);
    if (!pass)
        return of_fail(OF_NO_MEMORY, "out of memory for a backward pass");
    if (!begun && !begins(pass, first)) {
        of_pass_release(pass);
        return OF_REFUSED;
    }
    *out = pass;
    return OF_OK;
}

void of_pass_retain(of_pass *pass) {
    of_retain(&pass->refs);
}

void of_pass_release(of_pass *pass) {
    if (!pass || !of_was_last(&pass->refs))
        return;
    of_plan *plan = pass->plan;
    pthread_mutex_lock(&plan->lock);
    if (!pass->begun && plan->n_passes)
        plan->n_passes--;
    if (!pass->over)
        leave(pass, true);
    drop_waiting(pass);
    if (!plan->spare_pass)
        plan->spare_pass = pass;
    else
        of_pass_free(pass);
    pthread_mutex_unlock(&plan->lock);
    of_plan_unref(plan);
}

bool of_pass_only_adds(const of_pass *pass) {
    return pass->only_adds;
}

static of_status run(of_plan *plan, of_batch *batch, size_t *at) {
    of_status status = batch->n ? of_update_batch(plan, batch, at) : OF_OK;
    pthread_mutex_lock(&plan->lock);
    give_back(plan, batch);
    pthread_mutex_unlock(&plan->lock);
    return status;
}

/* As the current stream; the one before waits for it. */
static of_status run_on(of_plan *plan, const of_stream *stream, of_batch *batch, size_t *at) {
    const of_gpu_host *gpu = stream->device >= 0 && batch->n > 0 ? plan->host.gpu : NULL;
    const of_stream before = gpu ? gpu->current(plan->host.ctx, stream->device) : *stream;
    if (of_stream_equal(&before, stream))
        return run(plan, batch, at);
    gpu->exchange(plan->host.ctx, stream);
    of_status status = run(plan, batch, at);
    gpu->exchange(plan->host.ctx, &before);
    pthread_mutex_lock(&plan->lock);
    if (!of_stream_order(plan, stream, &before)) {
        of_plan_fail(plan);
        status = status == OF_OK ? of_plan_health(plan) : status;
    }
    pthread_mutex_unlock(&plan->lock);
    return status;
}

of_status of_pass_ready(of_pass *pass, size_t slot, size_t *slot_at) {
    of_plan *plan = pass->plan;
    of_batch batch = {0};
    bool by_itself = false;
    *slot_at = slot;
    pthread_mutex_lock(&plan->lock);
    of_status status = check_ready(pass, slot);
    const bool over = pass->over;
    if (status == OF_OK && !pass->only_adds && !pass->abandoned)
        by_itself = goes_by_itself(pass, slot, &batch);
    pthread_mutex_unlock(&plan->lock);
    if (by_itself)
        status = of_update_slot(plan, slot, slot_at);
    else if (batch.n)
        status = run(plan, &batch, slot_at);
    if (by_itself && over && status == OF_OK) /* of_pass_end() has been */
        status = of_plan_close(plan);
    return status;
}

/* One stream after the other. */
static of_status run_all(of_pass *pass, size_t *slot_at) {
    of_plan *plan = pass->plan;
    of_status status = OF_OK;
    pthread_mutex_lock(&plan->lock);
    for (of_waiting *waiting = pass->waiting; waiting && status == OF_OK; waiting = waiting->next) {
        of_batch batch = take(plan, waiting);
        const of_stream on = waiting->on;
        pthread_mutex_unlock(&plan->lock);
        status = run_on(plan, &on, &batch, slot_at);
        pthread_mutex_lock(&plan->lock);
    }
    pthread_mutex_unlock(&plan->lock);
    return status;
}

of_status of_pass_run(of_pass *pass, size_t *slot_at) {
    *slot_at = OF_NO_SLOT;
    return run_all(pass, slot_at);
}

of_status of_pass_end(of_pass *pass, size_t *slot_at) {
    of_plan *plan = pass->plan;
    *slot_at = OF_NO_SLOT;
    pthread_mutex_lock(&plan->lock);
    const bool over = pass->over;
    if (!over)
        leave(pass, false);
    if (plan->mode == OF_FINAL && !over && !pass->only_adds)
        plan->n_passes = 0; /* no step() comes */
    pthread_mutex_unlock(&plan->lock);
    of_status status = run_all(pass, slot_at);
    if (status != OF_OK || over || pass->only_adds)
        return status;
    *slot_at = OF_NO_SLOT;
    return of_plan_close(plan);
}

void of_pass_abandon(of_pass *pass) {
    pthread_mutex_lock(&pass->plan->lock);
    if (!pass->over)
        leave(pass, true);
    drop_waiting(pass);
    of_count_steps(pass->plan);
    pthread_mutex_unlock(&pass->plan->lock);
}

void of_plan_add_only(of_plan *plan, int entered) {
    pthread_mutex_lock(&plan->lock);
    plan->add_only += entered;
    pthread_mutex_unlock(&plan->lock);
}

void of_plan_restart_count(of_plan *plan) {
    pthread_mutex_lock(&plan->lock);
    plan->n_passes = 0;
    pthread_mutex_unlock(&plan->lock);
}
