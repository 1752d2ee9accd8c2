/* SPDX-License-Identifier: BSD-3-Clause */
/* queue.c: what a plan has in flight on each stream.
 *
 * No event is made for a launch. Whoever has to wait for one waits for all
 * that is on its stream by then; with one stream, as nearly always, nobody
 * does. To learn that updates have been done, step() leaves one event, the fence,
 * behind those in flight, or the next use of one of them does; every later step()
 * and such use asks for it.
 *
 * Memory that a side stream reads goes back to the stream that it came from: that one waits for the
 * launch before the last, so that only two launches' gradients are kept, and the allocator need
 * not ask when the side stream is done.
 *
 * Step counters on the device are counted here, too, behind all updates of a backward pass or
 * step(): one launch a stream. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static of_queue *queue_of(of_plan *plan, const of_stream *stream) {
    for (size_t i = 0; i < plan->n_queues; i++)
        if (of_stream_equal(&plan->queues[i].stream, stream))
            return &plan->queues[i];
    of_queue *queues = realloc(plan->queues, (plan->n_queues + 1) * sizeof *queues);
    if (!queues) {
        of_set_error("out of memory for a stream");
        return NULL;
    }
    plan->queues = queues;
    queues[plan->n_queues] = (of_queue){.stream = *stream};
    return &queues[plan->n_queues++];
}

/* Waits until the device has done all that is on the stream. False: it may still be working. */
static bool wait_for(of_plan *plan, const of_stream *stream) {
    const of_gpu_host *gpu = plan->host.gpu;
    void *event = NULL;
    const bool waited = gpu->record(plan->host.ctx, stream, &event) &&
                        gpu->synchronize(plan->host.ctx, event);
    if (event)
        gpu->destroy(plan->host.ctx, event);
    return waited;
}

/* If there is no memory for the queue, waits for the device instead. */
bool of_queue_add(of_plan *plan, of_update *update) {
    of_queue *queue = queue_of(plan, &update->in.stream);
    if (!queue) {
        if (!wait_for(plan, &update->in.stream))
            of_plan_fail(plan);
        return false;
    }
    of_retain(&update->holders);
    update->next_in_flight = NULL;
    if (queue->last)
        queue->last->next_in_flight = update;
    else
        queue->first = update;
    queue->last = update;
    queue->count++;
    update->in_flight = true;
    return true;
}

bool of_queue_count_later(of_plan *plan, const of_stream *stream, float *const *steps, size_t n) {
    of_queue *queue = queue_of(plan, stream);
    if (!queue)
        return false;
    if (queue->n_steps + n > queue->steps_capacity) {
        const size_t capacity = 2 * queue->steps_capacity + n;
        float **grown = realloc(queue->steps, capacity * sizeof *grown);
        if (!grown)
            return false;
        queue->steps = grown;
        queue->steps_capacity = capacity;
    }
    memcpy(queue->steps + queue->n_steps, steps, n * sizeof *steps);
    queue->n_steps += n;
    return true;
}

void of_count_steps(of_plan *plan) {
    for (size_t i = 0; i < plan->n_queues; i++) {
        of_queue *queue = &plan->queues[i];
        const size_t n = queue->n_steps;
        queue->n_steps = 0;
        queue->counted |= n > 0;
        if (n > 0 &&
            !plan->host.gpu->count(plan->host.ctx, &queue->stream, queue->steps, n, NULL))
            of_plan_fail(plan);
    }
}

bool of_stream_order(of_plan *plan, const of_stream *before, const of_stream *after) {
    const of_gpu_host *gpu = plan->host.gpu;
    if (of_stream_equal(before, after) || !OF_GUARD(streams))
        return true;
    of_queue *queue = queue_of(plan, before);
    return queue && gpu->record(plan->host.ctx, before, &queue->event) &&
           gpu->wait(plan->host.ctx, after, queue->event);
}

/* The gradients' own stream waits first: what it does next may be given their memory. */
static void let_go(of_plan *plan, of_held *held, of_list *done) {
    const of_update *first = held->updates.first;
    if (first && OF_GUARD(let_go) &&
        !plan->host.gpu->wait(plan->host.ctx, &first->in.ready, held->event))
        of_plan_fail(plan);
    for (of_update *u = held->updates.first, *next; u; u = next) {
        next = u->next;
        of_list_append(done, u);
    }
    held->updates = (of_list){0};
}

void of_queue_hold(of_plan *plan, const of_list *launched, of_list *done) {
    of_queue *queue = queue_of(plan, &launched->first->in.stream);
    const of_held last = queue->held[0];
    let_go(plan, &queue->held[1], done);
    queue->held[0] = (of_held){*launched, queue->held[1].event};
    queue->held[1] = last;
    if (!plan->host.gpu->record(plan->host.ctx, &queue->stream, &queue->held[0].event))
        of_plan_fail(plan);
}

void of_queues_let_go(of_plan *plan, of_list *done) {
    for (size_t i = 0; i < plan->n_queues; i++)
        for (size_t k = 2; k > 0; k--)
            let_go(plan, &plan->queues[i].held[k - 1], done);
}

/* A graph that waits for work outside of it ends its capture. of_access() refuses uses of such
 * memory inside the capture. */
static bool is_out_of_reach(const of_stream *home, const of_stream *user) {
    return user->capture != 0 && user->capture != home->capture && OF_GUARD(capture);
}

/* Launched, and not known to be done. What a capture launches is its graph's, and behind the
 * capture nobody waits for it. */
static bool has_work(const of_queue *queue, uint64_t capture) {
    const uint64_t home = queue->stream.capture;
    return (queue->count > 0 || queue->counted) && (home == 0 || home == capture);
}

bool of_queues_join(of_plan *plan) {
    for (size_t i = 0; i < plan->n_queues; i++) {
        const of_stream home = plan->queues[i].stream;
        const of_stream user = plan->host.gpu->current(plan->host.ctx, home.device);
        if (has_work(&plan->queues[i], user.capture) && !is_out_of_reach(&home, &user) &&
            !of_stream_order(plan, &home, &user))
            return false;
    }
    return true;
}

/* Forgets the n oldest. Their seals have gone at the launch, and from here on their marks go:
 * fence.h. */
static void forget(of_queue *queue, size_t n) {
    if (n > 0)
        of_order_marks();
    of_registry_remove_in_flight(queue->first, n);
    for (; n > 0 && queue->first; n--) {
        of_update *update = queue->first;
        queue->first = update->next_in_flight;
        queue->count--;
        update->in_flight = false;
        of_update_drop(update);
    }
    if (!queue->first)
        queue->last = NULL;
}

/* A fence that is out is not recorded again, or the device might never reach it. */
static void fence(of_plan *plan, of_queue *queue) {
    if (queue->count && plan->host.gpu->record(plan->host.ctx, &queue->stream, &queue->fence))
        queue->fenced = queue->count;
}

/* Inside of the capture nothing is forgotten: CUDA can't query events that were recorded there. */
static void leave_capture(of_plan *plan, of_queue *queue) {
    const of_stream *home = &queue->stream;
    if (plan->host.gpu->current(plan->host.ctx, home->device).capture == home->capture)
        return;
    forget(queue, queue->count);
    queue->fenced = 0;
}

void of_queues_reap(of_plan *plan) {
    for (size_t i = 0; i < plan->n_queues; i++) {
        of_queue *queue = &plan->queues[i];
        if (queue->stream.capture != 0) {
            leave_capture(plan, queue);
            continue;
        }
        if (queue->fenced && plan->host.gpu->is_done(plan->host.ctx, queue->fence)) {
            forget(queue, queue->fenced);
            queue->fenced = 0;
        }
        if (!queue->fenced)
            fence(plan, queue);
    }
}

void of_queues_fence(of_plan *plan) {
    for (size_t i = 0; i < plan->n_queues; i++)
        fence(plan, &plan->queues[i]);
}

static void close_queue(of_plan *plan, of_queue *queue) {
    void *const events[] = {queue->fence, queue->event, queue->held[0].event,
                            queue->held[1].event};
    forget(queue, queue->count);
    free(queue->steps);
    for (size_t i = 0; i < sizeof events / sizeof *events; i++)
        if (events[i])
            plan->host.gpu->destroy(plan->host.ctx, events[i]);
}

void of_queues_forget(of_plan *plan) {
    for (size_t i = 0; i < plan->n_queues; i++)
        close_queue(plan, &plan->queues[i]);
    plan->n_queues = 0;
}

bool of_queues_drain(of_plan *plan) {
    for (size_t i = 0; i < plan->n_queues; i++)
        if (has_work(&plan->queues[i], 0) && !wait_for(plan, &plan->queues[i].stream))
            return false;
    of_queues_forget(plan);
    return true;
}
