# SPDX-License-Identifier: BSD-3-Clause
"""How the GPU is looked at: at all tensors with one wait, which still sees every bit;
and with a clock that the host does not delay."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import bits
import pytest
import torch
from harness import common
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import kernels


def twins() -> tuple[Any, Any]:
    made = []
    for _ in range(2):
        params = [torch.nn.Parameter(torch.arange(n) / 7) for n in (3, 4, 9)]
        optimizer = common.adamw(params)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        made.append(optimizer)
    return made[0], made[1]


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "_local_scalar_dense" in str(op) or "is_nonzero" in str(op)
        return op(*args, **(kwargs or {}))


def test_a_look_at_all_tensors_waits_once() -> None:
    ours, stock = twins()
    with Waits() as waits:
        bits.assert_same_optimizers("x", ours, stock, gradients=True)
    assert waits.count == 1


def spoil_parameter(p: Any, state: Any) -> None:
    p.data[1] = -0.0 if p[1] == 0 else p[1].nextafter(torch.tensor(9.0))


SPOILERS = {
    "a parameter": spoil_parameter,
    "state": lambda p, state: state["exp_avg"].__setitem__(0, float("nan")),
    "a step": lambda p, state: state["step"].add_(1),
    "a gradient": lambda p, state: p.grad.__setitem__(2, -0.0),
    "no gradient": lambda p, state: setattr(p, "grad", None),
    "a key": lambda p, state: state.pop("exp_avg_sq"),
    "a dtype": lambda p, state: state.update(exp_avg=state["exp_avg"].double()),
}


@pytest.mark.parametrize("what", SPOILERS)
def test_a_look_sees(what: str) -> None:
    ours, stock = twins()
    p = ours.param_groups[0]["params"][1]
    with torch.no_grad():
        SPOILERS[what](p, ours.state[p])
    with pytest.raises(AssertionError):
        bits.assert_same_optimizers("x", ours, stock, gradients=True)


# Timing


def test_what_is_timed_on_a_gpu_is_launched_behind_queued_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No GPU has to be there to see in which order it would be asked."""
    order: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            order.append("event")

        def elapsed_time(self, end: Event) -> float:
            return 5.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda n: order.append(f"sleep {n}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(kernels, "WARM_SECONDS", 0.01)
    cycles = kernels.warm_up(lambda: order.append("run"), "cuda")
    assert order[0] == "run" and cycles >= 2_000_000, "a millisecond is 2,000,000 cycles"
    order.clear()
    kernels.Timer("cuda", cycles).time(lambda: order.append("run"))
    assert order == [f"sleep {cycles}", "event", "run", "event"]
