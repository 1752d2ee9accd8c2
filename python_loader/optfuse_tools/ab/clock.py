# SPDX-License-Identifier: BSD-3-Clause
"""Clock and memory of ab(), and the random numbers that its variants begin with."""

from __future__ import annotations

import contextlib
import random
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

_FROM_NOW_ON = "5"  # proc(5)


@dataclass(frozen=True)
class Seconds:
    """`wall` ends when the device has done all; where there is a GPU, `host`
    ends when the host has issued all, and `device` is the GPU's own time."""

    wall: float
    host: float | None = None
    device: float | None = None


class Clock:
    """Runs from here to stop(), and waits for the GPU only there and here."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        if torch.cuda.is_initialized():
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda.synchronize()
            self._events[0].record()
        self._start = time.perf_counter()

    def stop(self) -> Seconds:
        host = time.perf_counter() - self._start
        if not self._events:
            return Seconds(host)
        start, end = self._events
        end.record()
        torch.cuda.synchronize()
        wall = time.perf_counter() - self._start
        return Seconds(wall, host, start.elapsed_time(end) / 1e3)


def begin_peak() -> None:
    """From here on the peak of resident memory is a new one, where the kernel can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_FROM_NOW_ON)


def peak_mb() -> float:
    found = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0


def seed_all(seed: int) -> None:
    """The generators that a training script draws from, NumPy's where it is imported."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
