# SPDX-License-Identifier: BSD-3-Clause
"""Scenarios that several processes play together (ranks.py). The module of each says what it
promises: mostly that training has the bits of stock's, or those of one process."""

import pytest
import ranks
from common import HAS_PYTHON_H

EVERY_NUMBER = {
    "ddp_scripts": {
        3: ["option batched copy backward", "option buckets backward", "no_sync views forward",
            "option buckets awaited", "option buckets views sgd awaited"],
    },
    "await_scripts": {3: ["backward_and_step_do_not_wait copies awaited"]},
    "wrapper_scripts": {3: ["zero forward"]},
    "fsdp_scripts": {
        3: ["option plain forward", "option plain backward", "recorded ByShape backward"],
        4: ["hybrid forward", "hybrid backward", "recorded TensorCounter forward"],
    },
    "fsdp_schedule": {},
    "fsdp_checkpoints": {4: ["saved_and_loaded fewer backward"]},
    "tp_scripts": {4: ["with_fsdp forward", "with_fsdp backward"]},
    "kfac_scripts": dict.fromkeys(
        (3, 4),
        ["chosen planned balanced stock", "chosen each round_robin stock", "trained adamw forward",
         "some_ranks_that_know_different_numbers_of_groups_are_refused stock",
         "no_sync copies forward", "rows_say_how_unequal_batches_are stock",
         "unequal_batches_are_refused later forward",
         "resumed_by_another_number_of_processes to_many stock"],
    ),
    "kfac_messages": dict.fromkeys(
        (3, 4),
        ["ranks_that_use_layers_in_another_order planned stock",
         "late_contributions_on_one_rank paper stock"],
    ),
    "pipeline_scripts": dict.fromkeys(
        (3, 4),
        ["trained conv adamw layerpipe", "trained mlp sgd intra", "trained mlp momentum 1f1b",
         "trained mlp adamw gpipe", "trained conv sgd pipedream_replicated",
         "a_group_of_replicas_may_be_incomplete conv stash",
         "a_group_of_replicas_may_be_incomplete mlp latest",
         "a_group_of_replicas_may_be_incomplete mlp average",
         "a_state_saved_behind_an_incomplete_group_is_resumed pipedream_replicated"],
    ),
    "synchronous_scripts": dict.fromkeys(
        (3, 4),
        ["trained conv adamw backward fast_forward", "trained transformer sgd forward modulo",
         "trained mlp adamw backward 1f1b_flush",
         "the_last_group_may_be_incomplete transformer adamw backward fast_forward",
         "the_last_group_may_be_incomplete conv adamw forward modulo",
         "messages_change_the_order_and_no_bit 0 in flight fast_forward"],
    ),
}  # fmt: skip
CASES = [case for module, more in EVERY_NUMBER.items() for case in ranks.cases(module, more)]
# By two processes: with more, sums depend on the buckets, which follow the order of backward.
CASES += ranks.cases("order_scripts", worlds=(2,), all_usual=True)
WITH_INDUCTOR = (
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_PYTHON_H, reason="inductor needs Python's headers: python3-dev"),
)
CASES += [
    pytest.param(*case.values, marks=WITH_INDUCTOR if "inductor" in case.values[1] else ())
    for case in ranks.cases("compiled_scripts", worlds=(2,), all_usual=True)
]


@pytest.mark.parametrize(("world", "scenario"), CASES)
def test_scenario(world, scenario, played):
    assert played is None, played
