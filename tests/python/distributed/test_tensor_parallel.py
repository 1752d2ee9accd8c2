# SPDX-License-Identifier: BSD-3-Clause
"""Tensor parallelism: training DTensors has stock's bits, and unequal layouts are refused."""

import pytest
import tp_scripts

SCRIPTS = "tp_scripts"
MORE = tuple(pytest.param(world, marks=pytest.mark.slow) for world in (4,))


@pytest.mark.parametrize("scenario", tp_scripts.SCENARIOS)
@pytest.mark.parametrize("world", (2, *MORE))
def test_training_is_as_in_stock(world, scenario, played):
    assert played is None, played
