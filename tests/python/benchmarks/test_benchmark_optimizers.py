# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark's race of the optimizers compares what it says: each of stock's
implementations there is, the best of them, and the same bits in the end."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from optfuse._rules import NATIVE, RULES
from optfuse_tools.ab.result import Interval

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import kernels

    return kernels


@pytest.mark.parametrize("cls", dict.fromkeys((*RULES, *NATIVE)), ids=lambda cls: cls.__name__)
def test_every_optimizer_races_and_ends_with_the_bits_of_its_reference(kernels, cls):
    raced = kernels.race(cls, kernels.SMOKE)
    assert raced.equal_bits
    stock = set(raced.speed) - {"optfuse"}
    assert "for-loop" in stock and (cls is not torch.optim.AdamW or len(stock) == 3)
    assert raced.ms[raced.best].median == min(raced.ms[name].median for name in stock)


def test_other_bits_are_noticed(kernels):
    one, other = (kernels.made(torch.optim.SGD, kernels.SMOKE) for _ in range(2))
    assert kernels.equal(one, other)
    one.step()
    assert not kernels.equal(one, other)


def test_only_an_interval_below_one_is_called_slower(kernels):
    ms = {name: Interval(1.0, 1.0, 1.0) for name in ("for-loop", "optfuse")}
    for high, word in ((0.99, "SLOWER"), (1.0, "")):
        speed = {"for-loop": Interval(0.9, 0.8, high)}
        raced = kernels.Raced("SGD", "1 M", ms, {}, speed, "for-loop", True, None)
        assert raced.cells()[-1] == word


def test_the_section_rounding_times_each_way_beside_stock(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import rounding

    found = rounding.section(Namespace(smoke=True, rounds=1))
    names = [row["what"] for row in found["updates"]]
    assert names[0] == "fused=True" and names[-1] == rounding.EAGER
    assert {f"{name}, avx2" for name in rounding.ROUNDED} < set(names)
    assert found["updates"][0]["by_stock"].median == 1 and all(
        r["ns"].low > 0 for r in (*found["updates"], *found["factored"])
    )
    rows = {(row["class"], row["what"], row["how"]) for row in found["factored"]}
    assert len(rows) == 3 * len(rounding.FACTORED) * len(rounding.MATRICES)
