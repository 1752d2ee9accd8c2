# SPDX-License-Identifier: BSD-3-Clause
"""ZeroRedundancyOptimizer and PostLocalSGDOptimizer around a fused optimizer: stock's bits."""

import pytest
import wrapper_scripts

SCRIPTS = "wrapper_scripts"


@pytest.mark.parametrize("scenario", wrapper_scripts.SCENARIOS)
@pytest.mark.parametrize("world", (2, pytest.param(3, marks=pytest.mark.slow)))
def test_training_is_as_in_stock(world, scenario, played):
    assert played is None, played
