/* SPDX-License-Identifier: BSD-3-Clause */
/* slots.h: how far apart the tasks of a batch are, in a pipeline that of_pipeline_check() passed. */
#ifndef OPTFUSE_PLANNERS_PIPELINE_SLOTS_H
#define OPTFUSE_PLANNERS_PIPELINE_SLOTS_H

#include "planners/pipeline/tasks.h"

/* The slot of each kind of task of each layer, in batch 0: slots[layer * OF_TASK_KINDS + kind], 0
 * for kinds that it does not have, but those of a dW and U also where there are no weights.
 * slots: zeros. Returns the last of them. */
int32_t of_find_slots(const of_pipeline *p, int32_t *slots);

/* D of a layer that is on a stage of whole layers. A process has D + 1 batches between their
 * F and their gradients. */
uint32_t of_stage_delay(const of_pipeline *p, size_t layer);

/* How many processes are on stages after the layer's. */
size_t of_processes_after(const of_pipeline *p, size_t layer);

#endif
