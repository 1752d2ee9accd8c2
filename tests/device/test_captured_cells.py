# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of whole iterations in graphs, on the played GPU, which tells no times: each
variant trains there, and ours to the bits of fused=True."""

import sys
from pathlib import Path

import gpu
import pytest
from gpu import NAME

import optfuse

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import captured
from models import MLP

pytestmark = pytest.mark.skipif(gpu.IS_REAL or not gpu.REPLAYS, reason="benchmarks/run has it")


def played(work):
    side, seen = gpu.stream(), []
    side.wait_stream(gpu.current())
    with side:
        work()
    gpu.current().wait_stream(side)
    return gpu.graph_of(lambda: seen.append(work())), seen[0]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(captured.MODELS, "MLP", lambda: MLP(32, 3))


def compared(how, optimizer, wraps=None):
    cell = captured.Captured("MLP", 8, 2, NAME, how)
    build = captured.training(cell, optimizer, played)
    wraps = wraps or captured.variants(cell)
    return optfuse.ab(build, variants=wraps, rounds=1, iterations=2, warmup=1, progress=print)


CASES = [("", "adamw"), ("", "momentum"), ("clipped", "adamw"), ("scaled", "adamw")]


@pytest.mark.parametrize(("how", "optimizer"), CASES)  # no autocast is played
def test_a_captured_iteration_trains_to_the_bits_of_fused(how, optimizer):
    found = {row.name: row for row in compared(how, optimizer).rows}
    assert not [row.note for row in found.values() if row.note]
    ours = [row for name, row in found.items() if name.endswith("fusion")]
    assert len(ours) == (1 if how else 3)
    assert all(row.equal_bits and row.trained for row in ours)


def test_buckets_of_any_size_have_them_too():
    rows = compared("", "adamw", captured.buckets()).rows
    assert len(rows) == 1 + 2 * len(captured.MIB) and all(row.equal_bits for row in rows)
