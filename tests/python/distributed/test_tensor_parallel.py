# SPDX-License-Identifier: BSD-3-Clause
"""Tensor parallelism: training DTensors has stock's bits, and unequal layouts are refused."""

import ranks
import tp_scripts

SCRIPTS = "tp_scripts"


@ranks.by(tp_scripts.SCENARIOS, four=["with_fsdp forward", "with_fsdp backward"])
def test_training_is_as_in_stock(world, scenario, played):
    assert played is None, played
