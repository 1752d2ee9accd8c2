# SPDX-License-Identifier: BSD-3-Clause
"""DistributedDataParallel under torch.compile: stock's bits from as many graphs."""

import compiled_scripts
import pytest
from common import HAS_PYTHON_H

SCRIPTS = "compiled_scripts"
with_inductor = pytest.mark.skipif(
    not HAS_PYTHON_H, reason="inductor needs Python's headers: install python3-dev"
)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(name, marks=(pytest.mark.slow, with_inductor) if "inductor" in name else ())
        for name in compiled_scripts.SCENARIOS
    ],
)
@pytest.mark.parametrize("world", (2,))
def test_training_is_as_in_stock(world, scenario, played):
    assert played is None, played
