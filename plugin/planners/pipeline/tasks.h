/* SPDX-License-Identifier: BSD-3-Clause */
/* tasks.h: which tasks a layer has, where they run and what they take, in a pipeline that
 * of_pipeline_check() passed. */
#ifndef OPTFUSE_PLANNERS_PIPELINE_TASKS_H
#define OPTFUSE_PLANNERS_PIPELINE_TASKS_H

#include "planners/pipeline/pipeline.h"

/* Checks the layers alone, and the counts; places are not read. */
of_status of_check_pipeline_layers(const of_pipeline *p);
bool of_places_whole_layers(of_strategy strategy);
/* Whether several batches may share an update that the next F see: D = 0. */
bool of_is_synchronous(of_strategy strategy);
/* Whether it schedules by what is ready. */
bool of_forwards_fast(of_strategy strategy);
/* The first layer with weights; n if there is none. Layers above it have dX. */
size_t of_first_trained(const of_pipeline *p);
bool of_has_task(const of_pipeline *p, size_t first_trained, int kind, size_t layer);
int32_t of_process_of(const of_pipeline_place *place, int kind, size_t batch);
/* The share of the first part in a layer's dX; 1 if it is whole. */
double of_first_share(const of_pipeline_layer *layer, const of_pipeline_place *place);
double of_task_seconds(const of_pipeline_layer *layer, const of_pipeline_place *place, int kind);
/* The layer's updates are those of so many batches: where the last group is incomplete, replicas
 * without a batch in it update in the name of the batch that they would have. */
size_t of_updated_batches(const of_pipeline *p, size_t layer, size_t batches);
/* The most of all layers. */
size_t of_most_updated_batches(const of_pipeline *p, size_t batches);
/* Whether the layer has a task of this kind for a batch of that number. */
bool of_is_of_batch(const of_pipeline *p, int kind, size_t layer, size_t batch, size_t batches);
/* OF_INVALID: none, or more than an int32_t counts, or than memory can be asked for. */
of_status of_check_batches(const of_pipeline *p, size_t batches);

#endif
