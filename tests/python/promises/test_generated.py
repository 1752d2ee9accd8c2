# SPDX-License-Identifier: BSD-3-Clause
"""Random layers (generated.py), in a process that has tried no shape before."""

import json

from common import python_ok

PROGRAMS = 120
WAYS = ("panels in forward", "panels in backward", "made by a look")


def test_random_layers_train_as_in_stock():
    code = f"""
import json
from promises.generated import play
print(json.dumps(play(first=1, n={PROGRAMS})))
"""
    tally = json.loads(python_ok(code, timeout=300, OPTFUSE_PRODUCTS="force"))
    assert tally["programs"] == PROGRAMS
    for way in WAYS:
        assert tally.get(way, 0) >= 20, tally
