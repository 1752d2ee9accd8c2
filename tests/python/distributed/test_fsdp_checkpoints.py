# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of models sharded by FSDP2 are stock's, and are loaded as in stock."""

import fsdp_checkpoints
import ranks

SCRIPTS = "fsdp_checkpoints"


@ranks.by(fsdp_checkpoints.SCENARIOS, four=["loaded_on_fewer_processes backward"])
def test_checkpoints_are_as_in_stock(world, scenario, played):
    assert played is None, played
