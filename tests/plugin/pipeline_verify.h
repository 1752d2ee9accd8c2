/* SPDX-License-Identifier: BSD-3-Clause */
/* pipeline_verify.h: what is wrong with a schedule of a layer pipeline. */
#ifndef PIPELINE_VERIFY_H
#define PIPELINE_VERIFY_H

#include "planners/pipeline/pipeline.h"

/* Counts what is wrong with a schedule that has times: tasks that are unknown, doubled, missing,
 * misplaced, too short or too long; two at once or out of order on a process; a need that is not
 * met in time; an F that sees other updates than D says; updates of a layer, or dW of a group, out
 * of order; a batch that begins while in_flight of them are open. Any values may be in the tasks.
 * Relative tolerance of times: 1e-9. */
size_t count_violations(const of_pipeline *p, const of_network_link *link, const uint32_t *delays,
                        size_t batches, const of_pipeline_task *tasks, size_t n_tasks);

#endif
