# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark's race of the optimizers compares what it says: each of stock's
implementations there is, the best of them, and the same bits in the end."""

from pathlib import Path

import pytest
import torch

from optfuse._ab.result import Interval
from optfuse._own_step.register import INDEPENDENT
from optfuse._rules import RULES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def optimizers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import optimizers

    return optimizers


@pytest.mark.parametrize("cls", dict.fromkeys((*RULES, *INDEPENDENT)), ids=lambda cls: cls.__name__)
def test_every_optimizer_races_and_ends_with_the_bits_of_its_reference(optimizers, cls):
    raced = optimizers.race(cls, optimizers.SMOKE)
    assert raced.equal_bits
    assert "for-loop" in raced.speed and (cls.__name__ != "AdamW" or len(raced.speed) == 3)
    assert raced.us[raced.best].median == min(raced.us[name].median for name in raced.speed)


def test_other_bits_are_noticed(optimizers):
    one, other = (optimizers.made(torch.optim.SGD, optimizers.SMOKE) for _ in range(2))
    assert optimizers.equal(one, other)
    one.step()
    assert not optimizers.equal(one, other)


def test_only_an_interval_below_one_is_called_slower(optimizers):
    us = {name: Interval(1e3, 1e3, 1e3) for name in ("for-loop", "optfuse")}
    for high, word in ((0.99, "SLOWER"), (1.0, "")):
        speed = {"for-loop": Interval(0.9, 0.8, high)}
        raced = optimizers.Raced("SGD", "1 M", us, speed, "for-loop", True)
        assert raced.cells()[-1] == word
