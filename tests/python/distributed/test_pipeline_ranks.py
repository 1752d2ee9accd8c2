# SPDX-License-Identifier: BSD-3-Clause
"""Pipelines on several processes compute what one process does in an explicit loop."""

import pipeline_scripts
from ranks import by

SCRIPTS = "pipeline_scripts"
SAMPLE = [
    "trained conv adamw layerpipe",
    "trained mlp sgd intra",
    "trained mlp momentum 1f1b",
    "trained mlp adamw gpipe",
    "trained conv sgd pipedream_replicated",
    "a_group_of_replicas_may_be_incomplete conv stash",
    "a_group_of_replicas_may_be_incomplete mlp latest",
    "a_group_of_replicas_may_be_incomplete mlp average",
    "a_state_saved_behind_an_incomplete_group_is_resumed pipedream_replicated",
]


@by(pipeline_scripts.SCENARIOS, three=SAMPLE, four=SAMPLE)
def test_a_pipeline_computes_what_one_process_does(world, scenario, played):
    assert played is None, played
