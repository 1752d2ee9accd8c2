# SPDX-License-Identifier: BSD-3-Clause
"""The paper's experiments and the survey of classes say what was measured: every experiment runs,
the simulation counts what is moved, and a class that final mode trains otherwise is found."""

import os
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    if "OPTFUSE_BUILD" not in os.environ:
        monkeypatch.setenv("OPTFUSE_BUILD", str(Path(sys.prefix) / "build"))


@pytest.mark.parametrize("part", ["by_batch", "by_share", "by_layers"])
def test_each_experiment_compares_equal_training(part):
    import paper

    found = getattr(paper, part)(Namespace(smoke=True, rounds=2))
    assert found
    for row in found.values():
        assert row["share"].median > 0
        ours = {kind: row["variants"][kind] for kind in (paper.BACKWARD, paper.FORWARD)}
        assert all(kind["equal"] and kind["by_loop"].low > 0 for kind in ours.values())


def test_muon_is_compared_by_bits():
    import muon

    (form,) = muon.section(Namespace(smoke=True, rounds=2))["forms"]
    assert form["equal_bits"] and form["by_stock"].low > 0


@pytest.mark.full
def test_the_simulation_counts_what_an_update_moves(tmp_path):
    import traffic

    marks = Path(os.environ["OPTFUSE_BUILD"]) / "benchmarks" / "libcallgrind_marks.so"
    if shutil.which("valgrind") is None or not marks.is_file():
        pytest.skip("valgrind, or its headers, are missing")
    found = traffic.count(Namespace(smoke=True, out=tmp_path))
    bare, fused = (found["kinds"][kind] for kind in ("no optimizer", "fused=True"))
    # Weights are read for the products; the update reads them, gradients and two states again.
    assert bare["read_mb"] > found["weights_mb"]
    assert fused["read_mb"] - bare["read_mb"] == pytest.approx(4 * found["weights_mb"], rel=0.15)


class Halves(torch.optim.SGD):
    """Its step() on one parameter is another one than on all."""

    @torch.no_grad()
    def step(self, closure=None):
        with_gradient = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        alone = len(self.param_groups[0]["params"]) == 1
        for p in with_gradient:
            p.sub_(p.grad, alpha=0.1 if alone else 0.05)


def test_the_survey_finds_a_class_that_final_mode_trains_otherwise():
    import survey

    assert survey.compare_final(torch.optim.SGD) == (survey.FINAL, "")
    kind, why = survey.compare_final(Halves)
    assert kind == survey.DIFFERENT and "step 1" in why
