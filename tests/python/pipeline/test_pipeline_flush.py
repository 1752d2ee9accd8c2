# SPDX-License-Identifier: BSD-3-Clause
"""The figures of docs/pipelines.md that are simulated, and the orders beside which they stand."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def flush():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import pipeline_flush

        yield pipeline_flush


@pytest.fixture(scope="module")
def stored():
    path = ROOT / "benchmarks" / "results" / "pipeline-flush.json"
    return json.loads(path.read_text("utf-8"))


@pytest.mark.parametrize("stages", (2, 4, 8))
def test_the_results_of_even_stages_are_those_of_today(flush, stored, stages):
    """Each order is simulated whole, so each task is in it once, and is verified."""
    today = flush.bubbles(stages)
    (of_then,) = (one for one in stored["even_stages"] if one["stages"] == stages)
    assert today["bubble"] == pytest.approx(of_then["bubble"], rel=1e-4, abs=1e-9)
    assert today["held"] == pytest.approx(of_then["held"], rel=1e-4)
    for row, then in zip(today["rows"], of_then["rows"], strict=True):
        assert row == pytest.approx(then, rel=1e-4)


def test_the_results_of_a_deep_model_are_those_of_today(flush, stored):
    (then,) = (
        one for one in stored["models"] if (one["model"], one["network"]) == ("ResNet-50", "PCIe")
    )
    today = flush.of_model("ResNet-50", flush.NETWORKS["PCIe"], 8)
    assert today == pytest.approx(then["rows"][0], rel=1e-4)


def test_four_stages_gain_what_was_asked_for(stored):
    """1.20 times GPipe without delays of messages, 1.12 with a tenth of a forward pass; and no less
    than ZBV from a quarter on, with as many micro-batches open."""
    (of,) = (one for one in stored["even_stages"] if one["stages"] == 4)
    rows = {row["latency"]: row for row in of["rows"]}
    name = "optfuse fast_forward 2 P"
    assert rows[0.0][name] >= 1.20 and rows[0.1][name] >= 1.12
    for latency in (0.25, 0.5, 1.0):
        assert rows[latency][name] >= rows[latency]["ZBVZeroBubble"]
