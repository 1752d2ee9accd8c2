# SPDX-License-Identifier: BSD-3-Clause
"""The forecast of iterations in graphs is that of a model which knows the H200's updates, and its
file is what the model says."""

import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
RESULTS = BENCHMARKS / "results"


@pytest.fixture
def forecast(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import forecast

    return forecast


def measured():
    """Elements of the tensors, and us of an update of them on an H200."""
    raced = json.loads((RESULTS / "kernels-adamw-h200.json").read_text("utf-8"))["raced"]
    for row in raced:
        count, size = (int(text.replace(",", "")) for text in row["shape"].split(" x "))
        times = {name: 1000 * found["median"] for name, found in row["ms"].items()}
        yield [size] * count, times


def test_the_model_is_within_a_quarter_of_what_was_measured(forecast):
    rows = list(measured())
    fused = [forecast.fused_us(sizes) / times["fused"] for sizes, times in rows]
    ours = [forecast.ours_us([sum(sizes)]) / times["optfuse"] for sizes, times in rows]
    assert len(rows) == 6 and all(0.75 < ratio < 1.25 for ratio in fused), fused
    assert all(0.75 < ratio < 1.25 for ratio in ours[:5]), ours
    assert forecast.fused_us(forecast.sizes("GPT-2")) == pytest.approx(1023, rel=0.25)


def test_the_file_has_every_cell_of_the_first_call_as_the_model_says(forecast):
    text = (RESULTS / "forecast-h200.json").read_text("utf-8")
    found = {row["cell"]: row for row in json.loads(text)["forecast"]}
    assert list(found) == [str(cell) for cell in forecast.CELLS]
    assert json.loads(text)["measured"] is False
    for cell in forecast.CELLS:
        said = forecast.forecast(cell)
        row = found[str(cell)]
        assert row["update_us"] == pytest.approx(said.update_us, rel=1e-3)
        for name, speeds in said.times_fused.items():
            assert row["times_fused"][name] == pytest.approx(speeds, rel=1e-4)
