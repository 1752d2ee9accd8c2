# SPDX-License-Identifier: BSD-3-Clause
"""The section "promises" of the benchmark: its cases train with equal bits in each kind, gradients
that were never in memory are counted as such, and its reasons are those of the library."""

from functools import partial
from pathlib import Path

import pytest

import optfuse

ROOT = Path(__file__).parents[3]
ITERATIONS = 3


@pytest.fixture
def promises(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import promised_gradients

    return promised_gradients


@pytest.fixture
def forced(promises, monkeypatch):
    """Layers of any size promise, without a trial of time."""
    monkeypatch.setenv("OPTFUSE_PRODUCTS", "force")
    for mode in ("backward", "forward"):
        monkeypatch.setitem(promises.KINDS, f"{mode}, promises", (mode, None))
    return promises


def cases():
    """Small forms of all that CASES has."""
    return {
        "plain": {},
        "sizes": {"rows": (1, 2, 3)},
        "clip_grad_norm_": {"clips": 100.0},
        "accumulate": {"passes": 4},
        "norm logger": {"logs": True},
        "tokens": {"kind": "gpt", "width": 64},
    }


def small(**changes):
    from promised_gradients_cases import Case

    return Case(
        **{"kind": "mlp", "layers": 2, "width": 32, "rows": (4,), "iterations": 1, **changes}
    )


@pytest.mark.parametrize("name", cases())
def test_each_kind_trains_with_the_bits_of_fused(forced, name):
    case = small(**cases()[name])
    ours = forced.variants(case, {})
    compared = optfuse.ab(
        partial(forced.training, case), variants=ours, rounds=1, iterations=ITERATIONS
    )
    assert len(compared.rows) == (5 if case.in_backward else 3)
    assert all(row.equal_bits and row.trained for row in compared.rows), compared


def test_shares_count_gradients_that_were_never_in_memory(forced):
    case, made = small(), {}
    iterate = forced.training(case, partial(forced.fused, case, "backward, promises", made))
    for _ in range(ITERATIONS):
        iterate()
    found = forced.promised("backward, promises", made, ITERATIONS)
    assert found["gradients"] == found["never_in_memory"] == 2 * ITERATIONS
    assert found["share"] == pytest.approx(32 * 32 / (32 * 32 + 32))
    assert forced.promised("backward fusion", made, ITERATIONS) == {}
    assert forced.elements("parameter 0 of group 1 of shape (12, 34)") == 12 * 34


def test_reasons_that_stay_are_the_librarys(promises):
    source = (ROOT / "shim" / "promises" / "layer.cpp").read_text("utf-8")
    assert all(f'"{reason}"' in source for reason in promises.FINAL)


def test_names_of_cases_are_their_own(promises):
    from promised_gradients_cases import ALL, CASES, QUICK, SMOKE

    assert len({str(case) for case in CASES}) == len(CASES)
    assert all(ALL[str(case)] == case for case in (*CASES, *QUICK, *SMOKE))


@pytest.mark.slow
def test_a_process_of_its_own_measures_speed_and_memory(promises):
    (case,) = promises.SMOKE
    found = promises.alone("", "memory kept", "speed", case, 2, 0.1, 0.1, False)
    assert list(found["kinds"]) == [promises.FUSED, *promises.KINDS] and found["rounds"] == 2
    assert all(one["equal_bits"] for one in found["kinds"].values())
    assert "forward, promises" in promises.table(case, "memory kept", found)
    stock, ours = (
        promises.alone("", "default malloc", "peak", case, kind, 0.1)["tensors_mb"]
        for kind in (promises.FUSED, "backward fusion")
    )
    weights = case.layers * (case.width**2 + case.width) * 4 / 1e6
    assert stock >= 4 * weights > ours > 3 * weights, "parameters, gradients, two states"
