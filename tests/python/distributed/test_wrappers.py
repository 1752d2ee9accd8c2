# SPDX-License-Identifier: BSD-3-Clause
"""ZeroRedundancyOptimizer and PostLocalSGDOptimizer around a fused optimizer: stock's bits."""

import ranks
import wrapper_scripts

SCRIPTS = "wrapper_scripts"


@ranks.by(wrapper_scripts.SCENARIOS, three=["zero"])
def test_training_is_as_in_stock(world, scenario, played):
    assert played is None, played
