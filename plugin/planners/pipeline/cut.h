/* SPDX-License-Identifier: BSD-3-Clause */
/* cut.h: cutting layers into stages, with replicas or without. */
#ifndef OPTFUSE_PLANNERS_PIPELINE_CUT_H
#define OPTFUSE_PLANNERS_PIPELINE_CUT_H

#include "planners/pipeline/pipeline.h"

/* The input of of_cut_stages(). load: of the layers [from, to) on each of r processes that share
 * them; for r = 1 finite. */
typedef struct of_stage_loads {
    double (*load)(const void *of, size_t from, size_t to, size_t r);
    const void *of;
    size_t n;
    size_t most_replicas;
} of_stage_loads;

typedef struct of_stage {
    size_t from, to; /* layers */
    size_t process;  /* the first */
    size_t replicas;
} of_stage;

/* The stages on at most so many processes whose largest load is the least possible; among equals
 * those on fewer processes. stages: room for one a process. OF_NO_MEMORY. */
of_status of_cut_stages(const of_stage_loads *loads, size_t processes, of_stage *stages,
                        size_t *n_stages, double *largest);

#endif
