/* SPDX-License-Identifier: BSD-3-Clause */
/* held.h: what processes hold for gradients that are still to come. */
#ifndef OPTFUSE_PLANNERS_PIPELINE_HELD_H
#define OPTFUSE_PLANNERS_PIPELINE_HELD_H

#include "planners/pipeline/events.h"

/* Writes in_flight and held_bytes of the report, from n tasks that have all run. OF_NO_MEMORY. */
of_status of_find_held(const of_events *e, size_t n, of_pipeline_report *report);

#endif
