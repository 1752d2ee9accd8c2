# SPDX-License-Identifier: BSD-3-Clause
"""Pipelines without delays compute what one process does that accumulates micro-batches."""

import synchronous_scripts
from ranks import by

SCRIPTS = "synchronous_scripts"
SAMPLE = [
    "trained conv adamw backward fast_forward",
    "trained transformer sgd forward modulo",
    "trained mlp adamw backward 1f1b_flush",
    "the_last_group_may_be_incomplete transformer adamw backward fast_forward",
    "the_last_group_may_be_incomplete conv adamw forward modulo",
    "messages_change_the_order_and_no_bit 0 in flight fast_forward",
]


@by(synchronous_scripts.SCENARIOS, three=SAMPLE, four=SAMPLE)
def test_a_pipeline_trains_as_one_process_does(world, scenario, played):
    assert played is None, played
