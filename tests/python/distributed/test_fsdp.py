# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2 (fully_shard): training a sharded model has stock's bits."""

import fsdp_scripts
import pytest

SCRIPTS = "fsdp_scripts"
MORE = tuple(pytest.param(world, marks=pytest.mark.slow) for world in (3, 4))


@pytest.mark.parametrize("scenario", fsdp_scripts.SCENARIOS)
@pytest.mark.parametrize("world", (2, *MORE))
def test_training_is_as_in_stock(world, scenario, played):
    assert played is None, played
