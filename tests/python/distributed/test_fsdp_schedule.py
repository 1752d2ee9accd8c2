# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2 (fully_shard): when the updates of a group of parameters run, and what becomes of its
gradients."""

import fsdp_schedule
import ranks

SCRIPTS = "fsdp_schedule"


@ranks.by(fsdp_schedule.SCENARIOS)
def test_updates_run_when_they_may(world, scenario, played):
    assert played is None, played
