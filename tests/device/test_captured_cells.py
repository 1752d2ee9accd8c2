# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of whole iterations in graphs, on the played GPU, which tells no times: each
variant trains there, ours to the bits of fused=True, and tests/gpu/run can judge what it writes."""

import json
import math
import sys
from argparse import Namespace
from pathlib import Path

import gpu
import pytest
from gpu import NAME

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "gpu"))

import captured
from judge import judge_captured
from models import MLP
from part import Command, Ran

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
    monkeypatch.setattr(captured, "in_a_graph", played)
    monkeypatch.setattr(captured, "peak_on_gpu", lambda build, wrap: float(build(wrap)()))


def section(optimizer, **chosen):
    usual = {"device": "cuda", "smoke": False, "more": False, "model": None, "compiled": False}
    usual |= {"rounds": 1, "seconds": 0.0, "until": math.inf, "raw_rounds": {}}
    return captured.section(Namespace(optimizer=optimizer, **{**usual, **chosen}))


def cell_of(how):
    return captured.Captured("MLP", 8, 2, NAME, how)


@pytest.mark.parametrize(
    ("hows", "optimizer"), [(("clipped", "scaled"), "adamw"), ((), "momentum")]
)
def test_captured_iterations_train_to_the_bits_of_fused(hows, optimizer, monkeypatch, tmp_path):
    """In bfloat16, too, but no autocast is played."""
    cells = [cell_of(how) for how in ("", *hows)]
    monkeypatch.setattr(captured, "CELLS", cells)
    found = section(optimizer)
    names = {one["cell"]: [line["name"] for line in one["lines"]] for one in found["cells"]}
    ours = {cell: sum(name.endswith("fusion") for name in of) for cell, of in names.items()}
    assert ours == {
        str(cell_of("buckets")): 0,
        **{str(cell): 1 for cell in cells},
        str(cells[0]): 3,
    }
    assert len(names[str(cell_of("buckets"))]) == 1 + 2 * len(captured.MIB)
    assert list(found["peak"]) == [str(cells[0])]
    assert judged(found, tmp_path) in ("ok", "MISSED")  # as slow as it may be, its bits are right
    found["cells"][0]["lines"][-1]["equal_bits"] = False
    assert judged(found, tmp_path) == "FAILED"


def judged(found, folder):
    (folder / "captured-x.json").write_text(json.dumps(found), encoding="utf-8")
    return judge_captured([Ran(Command([]), 0, "x")], folder).word


def test_each_call_has_cells_of_its_own():
    chosen = [
        captured.chosen_cells(Namespace(smoke=False, more=more, model=None)) for more in (0, 1)
    ]
    assert len(chosen[0]) == 5 and len(chosen[1]) == 6 and not {*chosen[0]} & {*chosen[1]}
