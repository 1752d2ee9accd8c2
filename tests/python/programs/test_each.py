# SPDX-License-Identifier: BSD-3-Clause
"""Every deed in both modes, with each kind of optimizer that it fits: stock's bits, or what the
deed says of this mode. By hand: pytest tests/python/programs/test_each.py -k NAME."""

import json
import os

import pytest
from common import python
from small_gradients import small_gradients_wait  # noqa: F401
from torch.optim import lr_scheduler

from programs.cases import failures
from programs.deed import DEEDS
from programs.deeds.tuning import SCHEDULERS
from programs.play import MODES


@pytest.mark.parametrize("name", DEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_each(mode, name):
    found = failures(name, mode)
    assert not found, f"{len(found)} cases fail, such as\n" + "\n".join(found[:3])


@pytest.fixture(scope="module")
def controls():
    library = os.environ.get("OPTFUSE_GUARDS_LIBRARY")
    if not library:
        pytest.skip("OPTFUSE_GUARDS_LIBRARY does not name the build with -Dguards=true")
    done = python("from programs.faults import of_deeds\nof_deeds()", OPTFUSE_LIBRARY=library)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [name for name, deed in DEEDS.items() if deed.fault])
def test_a_deed_fails_without_its_guard(name, controls):
    with_guard, without = controls[name]
    assert not with_guard, f"with the guard {DEEDS[name].fault[0]!r} on: {with_guard[0]}"
    assert without, f"it is as well with the guard {DEEDS[name].fault[0]!r} off"


def test_no_scheduler_is_left_out():
    found = {
        name
        for name, one in vars(lr_scheduler).items()
        if isinstance(one, type) and issubclass(one, lr_scheduler.LRScheduler)
    }
    assert found - {"LRScheduler", "_LRScheduler"} <= set(SCHEDULERS)
