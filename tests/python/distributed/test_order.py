# SPDX-License-Identifier: BSD-3-Clause
"""reorder() under DistributedDataParallel has stock's bits in both modes, and "auto" takes the
same plan on every rank."""

import order_scripts
import pytest

SCRIPTS = "order_scripts"


# By two processes: with more, sums depend on the buckets, which follow the order of backward.
@pytest.mark.parametrize(("world", "scenario"), [(2, name) for name in order_scripts.SCENARIOS])
def test_training_is_as_in_stock(world, scenario, played):
    assert played is None, played
