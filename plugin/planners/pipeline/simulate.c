/* SPDX-License-Identifier: BSD-3-Clause */
/* simulate.c: when the tasks of a schedule run, and what is sent between processes. */
#include <stdlib.h>
#include <string.h>

#include "fail.h"
#include "planners/pipeline/events.h"
#include "planners/pipeline/held.h"

typedef struct simulation {
    of_events events;
    of_pipeline_task *tasks;
    size_t n;
    size_t *queue; /* the tasks by processes, each in its order */
    size_t *next;  /* of each process, its place in the queue; they end where the next began */
    size_t *ends;  /* of each process */
} simulation;

/* False: it has to wait for something that has not run yet. */
static bool run(simulation *s, of_pipeline_task *task) {
    const of_wait w = of_wait_of(&s->events, task);
    if (!w.never)
        of_run(&s->events, task, &w);
    return !w.never;
}

/* In turn, each process as far as it gets. */
static void run_all(simulation *s) {
    for (bool progress = true; progress;) {
        progress = false;
        for (size_t q = 0; q < s->events.p->processes; q++)
            for (; s->next[q] < s->ends[q] && run(s, &s->tasks[s->queue[s->next[q]]]); s->next[q]++)
                progress = true;
    }
}

static const char *const names[] = {"forward", "input gradient", "second input gradient",
                                    "weight gradient", "update"};

static of_status check_all_ran(const simulation *s) {
    for (size_t q = 0; q < s->events.p->processes; q++)
        if (s->next[q] < s->ends[q]) {
            const of_pipeline_task *task = &s->tasks[s->queue[s->next[q]]];
            return of_fail(OF_INVALID,
                           "process %d of a pipeline waits forever before the %s of layer %d, "
                           "batch %d: what that needs is missing or comes later",
                           task->process, names[task->kind], task->layer, task->batch);
        }
    return OF_OK;
}

/* When the task of this kind, layer and batch ends; below 0: there is none. */
static double end_of(const simulation *s, int kind, size_t layer, size_t batch) {
    const size_t found = *of_index_of(&s->events, kind, layer, batch);
    return found == OF_NO_TASK ? -1 : s->tasks[found].end;
}

/* The most seconds a batch that a task of this layer took from the first third of its groups to
 * the second; below 0: it has too few groups. */
static double period_of_layer(const simulation *s, size_t layer) {
    const size_t group = of_pipeline_group(s->events.p, layer),
                 groups = s->events.batches / group / 3;
    if (!groups)
        return -1;
    const size_t from = groups * group - 1, to = 2 * groups * group - 1;
    double longest = 0;
    for (int kind = 0; kind < OF_TASK_KINDS; kind++) {
        const double first = end_of(s, kind, layer, from), last = end_of(s, kind, layer, to);
        if (first >= 0 && last >= 0)
            longest = of_later(longest, (last - first) / (double)(to - from));
    }
    return longest;
}

static double period_of(const simulation *s) {
    double longest = 0;
    for (size_t i = 0; i < s->events.p->n; i++) {
        const double period = period_of_layer(s, i);
        if (period < 0)
            return 0;
        longest = of_later(longest, period);
    }
    return longest;
}

static of_status report_of(const simulation *s, of_pipeline_report *report) {
    double busy = 0;
    report->period = period_of(s);
    for (size_t k = 0; k < s->n; k++) {
        busy += s->tasks[k].end - s->tasks[k].start;
        report->makespan = of_later(report->makespan, s->tasks[k].end);
    }
    if (report->makespan > 0)
        report->busy = busy / report->makespan / (double)s->events.p->processes;
    report->messages = s->events.messages / (double)s->events.batches;
    report->bytes = s->events.bytes / (double)s->events.batches;
    return of_find_held(&s->events, s->n, report);
}

static bool is_known(const simulation *s, const of_pipeline_task *task) {
    return task->kind >= 0 && task->kind < OF_TASK_KINDS && task->layer >= 0 &&
           (size_t)task->layer < s->events.p->n && task->batch >= 0 &&
           of_is_of_batch(s->events.p, task->kind, (size_t)task->layer, (size_t)task->batch,
                          s->events.batches) &&
           of_has_task(s->events.p, s->events.first_trained, task->kind, (size_t)task->layer) &&
           task->process ==
               of_process_of(&s->events.p->places[task->layer], task->kind, (size_t)task->batch);
}

static of_status enter_tasks(simulation *s) {
    for (size_t k = 0; k < s->n; k++) {
        of_pipeline_task *task = &s->tasks[k];
        size_t *index = is_known(s, task) ? of_index_of(&s->events, task->kind, (size_t)task->layer,
                                                        (size_t)task->batch)
                                          : NULL;
        if (!index || *index != OF_NO_TASK)
            return of_fail(OF_INVALID,
                           "task %zu of a schedule (kind %d, layer %d, batch %d, process %d) is "
                           "unknown, misplaced or doubled",
                           k, task->kind, task->layer, task->batch, task->process);
        *index = k;
    }
    return OF_OK;
}

/* By processes: a counting sort, which keeps the order. */
static void fill_queue(simulation *s) {
    for (size_t k = 0; k < s->n; k++)
        s->ends[s->tasks[k].process]++;
    for (size_t q = 1; q < s->events.p->processes; q++)
        s->ends[q] += s->ends[q - 1];
    for (size_t k = s->n; k-- > 0;)
        s->queue[--s->ends[s->tasks[k].process]] = k;
    for (size_t q = 0; q < s->events.p->processes; q++) {
        s->next[q] = s->ends[q];
        s->ends[q] = q + 1 < s->events.p->processes ? s->ends[q + 1] : s->n;
    }
}

static of_status prepare(simulation *s) {
    s->queue = calloc(s->n + 1, sizeof *s->queue);
    s->next = calloc(s->events.p->processes, sizeof *s->next);
    s->ends = calloc(s->events.p->processes, sizeof *s->ends);
    if (!s->queue || !s->next || !s->ends)
        return of_fail(OF_NO_MEMORY, "out of memory for a simulation of %zu tasks", s->n);
    return enter_tasks(s);
}

static of_status simulate(simulation *s, of_pipeline_report *report) {
    of_status status = prepare(s);
    if (status != OF_OK)
        return status;
    fill_queue(s);
    run_all(s);
    status = check_all_ran(s);
    if (status == OF_OK)
        status = report_of(s, report);
    return status;
}

static void release(simulation *s) {
    of_events_release(&s->events);
    free(s->tasks);
    free(s->queue);
    free(s->next);
    free(s->ends);
}

static of_status check(const of_pipeline *p, const of_network_link *link, size_t batches,
                       const void *tasks, const void *report) {
    of_status status = of_pipeline_check(p);
    if (status == OF_OK)
        status = of_check_network_link(link);
    if (status == OF_OK)
        status = of_check_batches(p, batches);
    if (status == OF_OK && (!tasks || !report))
        status = of_fail(OF_INVALID, "a simulation needs tasks and a report");
    return status;
}

of_status of_pipeline_simulate(const of_pipeline *p, const of_network_link *link, size_t batches,
                               of_pipeline_task *tasks, size_t n_tasks,
                               of_pipeline_report *report) {
    of_status status = check(p, link, batches, tasks, report);
    if (status != OF_OK)
        return status;
    simulation s = {.tasks = calloc(n_tasks + 1, sizeof *tasks), .n = n_tasks};
    of_pipeline_report found = {0};
    for (size_t k = 0; s.tasks && k < n_tasks; k++) {
        s.tasks[k] = tasks[k];
        s.tasks[k].start = s.tasks[k].end = -1;
    }
    status = of_events_begin(&s.events, p, link, batches, s.tasks);
    if (status == OF_OK)
        status =
            s.tasks ? simulate(&s, &found)
                    : of_fail(OF_NO_MEMORY, "out of memory for a simulation of %zu tasks", n_tasks);
    if (status == OF_OK) {
        memcpy(tasks, s.tasks, n_tasks * sizeof *tasks);
        *report = found;
    }
    release(&s);
    return status;
}
