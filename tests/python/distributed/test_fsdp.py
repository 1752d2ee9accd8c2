# SPDX-License-Identifier: BSD-3-Clause
"""FSDP2 (fully_shard): training a sharded model has stock's bits."""

import fsdp_scripts
import ranks

SCRIPTS = "fsdp_scripts"


@ranks.by(
    fsdp_scripts.SCENARIOS,
    three=["option plain forward", "option plain backward", "recorded ByShape backward"],
    four=["hybrid forward", "hybrid backward", "recorded TensorCounter forward"],
)
def test_training_is_as_in_stock(world, scenario, played):
    assert played is None, played
