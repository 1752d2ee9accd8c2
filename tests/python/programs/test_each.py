# SPDX-License-Identifier: BSD-3-Clause
"""Every deed in both modes, with each kind of optimizer that it fits: stock's bits, or what the
deed says of this mode. By hand: pytest tests/python/programs/test_each.py -k NAME."""

import pytest
from on_device import DEVICE
from small_gradients import small_gradients_wait  # noqa: F401
from torch.optim import lr_scheduler

from programs.cases import failures
from programs.deed import DEEDS
from programs.deeds.tuning import SCHEDULERS
from programs.play import MODES

#: On a device those of random programs, and what is about memory or kernels.
OF_DEVICES = ("clipping", "layouts", "overwriting", "zeroing")
PLAYED = [
    name
    for name, deed in DEEDS.items()
    if not DEVICE or deed.weight or deed.function.__module__.endswith(OF_DEVICES)
]


@pytest.mark.parametrize("name", PLAYED)
@pytest.mark.parametrize("mode", MODES)
def test_each(mode, name):
    found = failures(name, mode)
    assert not found, f"{len(found)} cases fail, such as\n" + "\n".join(found[:3])


def test_no_scheduler_is_left_out():
    found = {
        name
        for name, one in vars(lr_scheduler).items()
        if isinstance(one, type) and issubclass(one, lr_scheduler.LRScheduler)
    }
    assert found - {"LRScheduler", "_LRScheduler"} <= set(SCHEDULERS)
