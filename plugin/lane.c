/* SPDX-License-Identifier: BSD-3-Clause */
/* lane.c: what a plan has in flight on each stream.
 *
 * No event is made for a launch. Whoever has to wait for one waits for all
 * that is on its stream by then; with one stream, as nearly always, nobody
 * does. To learn that updates have been done, step() leaves one event, the fence,
 * behind those in flight, or the next use of one of them does; every later step()
 * asks for it, and such uses now and then. */
#include <stdlib.h>

#include "internal.h"

bool of_stream_equal(const of_stream *a, const of_stream *b) {
    return a->device == b->device && a->id == b->id && a->capture == b->capture;
}

static of_lane *lane_of(of_plan *plan, const of_stream *stream) {
    for (size_t i = 0; i < plan->n_lanes; i++)
        if (of_stream_equal(&plan->lanes[i].stream, stream))
            return &plan->lanes[i];
    of_lane *lanes = realloc(plan->lanes, (plan->n_lanes + 1) * sizeof *lanes);
    if (!lanes) {
        of_set_error("out of memory for a stream");
        return NULL;
    }
    plan->lanes = lanes;
    lanes[plan->n_lanes] = (of_lane){.stream = *stream};
    return &lanes[plan->n_lanes++];
}

/* Until the device has done all that is on the stream; false: it may still be at it. */
static bool wait_for(of_plan *plan, const of_stream *stream) {
    const of_device_host *device = plan->host.device;
    void *event = NULL;
    const bool waited = device->record(plan->host.ctx, stream, &event) &&
                        device->synchronize(plan->host.ctx, event);
    if (event)
        device->destroy(plan->host.ctx, event);
    return waited;
}

/* Without memory the device's work is waited for instead. */
bool of_lane_add(of_plan *plan, of_update *update) {
    of_lane *lane = lane_of(plan, &update->in.stream);
    if (!lane) {
        if (!wait_for(plan, &update->in.stream))
            of_plan_fail(plan);
        return false;
    }
    atomic_store_explicit(&update->holders, 2, memory_order_relaxed);
    update->next_flying = NULL;
    if (lane->last)
        lane->last->next_flying = update;
    else
        lane->first = update;
    lane->last = update;
    lane->count++;
    update->flying = true;
    return true;
}

bool of_stream_order(of_plan *plan, const of_stream *before, const of_stream *after) {
    const of_device_host *device = plan->host.device;
    if (of_stream_equal(before, after) || !OF_GUARD(streams))
        return true;
    of_lane *lane = lane_of(plan, before);
    return lane && device->record(plan->host.ctx, before, &lane->event) &&
           device->wait(plan->host.ctx, after, lane->event);
}

/* A graph can't wait for work outside of it: that ends the capture. What uses
 * such memory inside the capture is refused at its touch. */
static bool is_out_of_reach(const of_stream *home, const of_stream *user) {
    return user->capture != 0 && user->capture != home->capture && OF_GUARD(capture);
}

bool of_lanes_join(of_plan *plan) {
    for (size_t i = 0; i < plan->n_lanes; i++) {
        const of_stream home = plan->lanes[i].stream;
        if (plan->lanes[i].count == 0)
            continue;
        const of_stream user = plan->host.device->current(plan->host.ctx, home.device);
        if (!is_out_of_reach(&home, &user) && !of_stream_order(plan, &home, &user))
            return false;
    }
    return true;
}

/* Where a later update has the key, it is that one's. */
static void tell_landed(of_plan *plan, const of_update *update) {
    const void *key = update->in.keys[0];
    if (plan->host.landed && !update->scaling && !of_registry_has(key))
        plan->host.landed(plan->host.ctx, plan->slots[update->slot].tensor, key);
}

/* Forgets the n oldest. */
static void forget(of_plan *plan, of_lane *lane, size_t n, bool tell) {
    for (; n > 0 && lane->first; n--) {
        of_update *update = lane->first;
        lane->first = update->next_flying;
        lane->count--;
        of_registry_remove_one(update);
        if (tell)
            tell_landed(plan, update);
        update->flying = false;
        of_update_drop(update);
    }
    if (!lane->first)
        lane->last = NULL;
}

/* A fence that is out stays where it is, or it might never be reached. */
static void fence(of_plan *plan, of_lane *lane) {
    if (lane->count && plan->host.device->record(plan->host.ctx, &lane->stream, &lane->fence))
        lane->fenced = lane->count, lane->uses = 0;
}

/* To ask costs the host as much as a use does of what is in flight, and while a device has
 * much to do each weight is used several times. */
static bool is_passed(const of_plan *plan, of_lane *lane, bool at_use) {
    enum { USES_A_LOOK = 8 };
    if (at_use && lane->uses++ % USES_A_LOOK != 0)
        return false;
    return plan->host.device->is_done(plan->host.ctx, lane->fence);
}

void of_lanes_land(of_plan *plan, bool at_use) {
    for (size_t i = 0; i < plan->n_lanes; i++) {
        of_lane *lane = &plan->lanes[i];
        if (lane->fenced && is_passed(plan, lane, at_use)) {
            forget(plan, lane, lane->fenced, at_use);
            lane->fenced = 0;
        }
        if (!lane->fenced)
            fence(plan, lane);
    }
}

void of_lanes_fence(of_plan *plan) {
    for (size_t i = 0; i < plan->n_lanes; i++)
        fence(plan, &plan->lanes[i]);
}

static void close_lane(of_plan *plan, of_lane *lane) {
    void *const events[] = {lane->fence, lane->event};
    forget(plan, lane, lane->count, false);
    for (size_t i = 0; i < 2; i++)
        if (events[i])
            plan->host.device->destroy(plan->host.ctx, events[i]);
}

void of_lanes_forget(of_plan *plan) {
    for (size_t i = 0; i < plan->n_lanes; i++)
        close_lane(plan, &plan->lanes[i]);
    plan->n_lanes = 0;
}

bool of_lanes_drain(of_plan *plan) {
    for (size_t i = 0; i < plan->n_lanes; i++)
        if (plan->lanes[i].count && !wait_for(plan, &plan->lanes[i].stream))
            return false;
    of_lanes_forget(plan);
    return true;
}

void of_lanes_free(of_plan *plan) {
    free(plan->lanes);
}
