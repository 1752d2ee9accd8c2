# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints of models sharded by FSDP2 are stock's, and are loaded as in stock."""

import fsdp_checkpoints
import pytest

SCRIPTS = "fsdp_checkpoints"
MORE = tuple(pytest.param(world, marks=pytest.mark.slow) for world in (3, 4))


@pytest.mark.parametrize("scenario", fsdp_checkpoints.SCENARIOS)
@pytest.mark.parametrize("world", (2, *MORE))
def test_checkpoints_are_as_in_stock(world, scenario, played):
    assert played is None, played
