# SPDX-License-Identifier: BSD-3-Clause
"""A GPU is timed by a clock that the host does not delay."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import kernels


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
