# SPDX-License-Identifier: BSD-3-Clause
"""A sample of what run_promises.py plays, in a process that has tried no shape before."""

import json

import pytest
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


@pytest.mark.parametrize(("products", "programs"), (("force", 150), ("auto", 30)))
def test_random_hooks_see_what_they_see_in_stock(products, programs):
    code = f"""
import json
from promises.generated import play
print(json.dumps(play(first=1, n={programs}, hooks=True)))
"""
    tally = json.loads(python_ok(code, timeout=300, OPTFUSE_PRODUCTS=products))
    assert tally["programs"] == programs and tally["refused"] < programs / 2, tally
    for way in WAYS:
        assert tally.get(way, 0) >= programs / 5, tally
