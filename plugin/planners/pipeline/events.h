/* SPDX-License-Identifier: BSD-3-Clause */
/* events.h: the tasks of a pipeline that have run so far, and what the next ones wait for. The
 * pipeline has passed of_pipeline_check(). */
#ifndef OPTFUSE_PLANNERS_PIPELINE_EVENTS_H
#define OPTFUSE_PLANNERS_PIPELINE_EVENTS_H

#include "planners/pipeline/tasks.h"

#define OF_NO_TASK SIZE_MAX

typedef struct of_events {
    const of_pipeline *p;
    const of_network_link *link;
    size_t first_trained;
    size_t batches;
    of_pipeline_task *tasks; /* borrowed; those that have not run end below 0 */
    size_t *index;   /* of the task of each kind, layer and batch; OF_NO_TASK: there is none */
    double *free_at; /* of each process */
    double messages, bytes;
} of_events;

/* When a task can start, and what is sent for it. */
typedef struct of_wait {
    const of_pipeline_task *task;
    double until;
    double messages, bytes;
    bool never; /* something has not run yet */
} of_wait;

/* OF_NO_MEMORY; to be released in any case. */
of_status of_events_begin(of_events *e, const of_pipeline *p, const of_network_link *link,
                          size_t batches, of_pipeline_task *tasks);
void of_events_release(of_events *e);
size_t *of_index_of(const of_events *e, int kind, size_t layer, size_t batch);
of_wait of_wait_of(const of_events *e, const of_pipeline_task *task);
/* task: in the index, for of_wait_of() the next ones. */
void of_run(of_events *e, of_pipeline_task *task, const of_wait *wait);

#endif
