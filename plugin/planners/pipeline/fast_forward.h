/* SPDX-License-Identifier: BSD-3-Clause */
/* fast_forward.h: schedules that are made task by task, by what is ready. */
#ifndef OPTFUSE_PLANNERS_PIPELINE_FAST_FORWARD_H
#define OPTFUSE_PLANNERS_PIPELINE_FAST_FORWARD_H

#include "planners/pipeline/pipeline.h"

/* Each process takes of the tasks that can start first a dX, else an F, while it has fewer than
 * in_flight batches open, else a dW: so a dW runs when nothing else is ready, or when no other
 * batch may begin. U follows the last dW of its group. p and batches have been checked. tasks: room
 * for of_pipeline_count(). OF_NO_MEMORY. */
of_status of_schedule_fast_forward(const of_pipeline *p, const of_network_link *link,
                                   size_t batches, of_pipeline_task *tasks);

#endif
