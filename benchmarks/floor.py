# SPDX-License-Identifier: BSD-3-Clause
"""The least that an update can cost: the bytes it must move, at the speed of a
kernel that moves them and computes nothing (floor.c), on the same threads."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

#: Arrays that an update reads and writes: the parameter and its state.
WRITTEN = {"adamw": 3, "adam": 3, "momentum": 2, "sgd": 1}
LINE = 64  # bytes; floor.c moves whole lines


def bytes_each(optimizer: str, element: int = 4, cached: bool = False) -> int:
    """What the update of one parameter has to move. cached: the gradient, which
    is only read, is in the cache, as it may be in backward fusion."""
    return element * (2 * WRITTEN[optimizer] + (0 if cached else 1))


def _open() -> Any:
    """The build is where benchmarks/run says. None if it isn't, or if it was
    made for an OpenMP runtime that PyTorch does not have."""
    path = Path(os.environ.get("OPTFUSE_BUILD", "")) / "benchmarks" / "libfloor.so"
    try:
        function = ctypes.CDLL(str(path)).floor_pass
    except OSError:
        return None
    function.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_size_t] * 2 + [ctypes.c_int] * 2
    function.restype = None
    return function


_floor_pass = _open()
available = _floor_pass is not None


class Floor:
    """Of one optimizer and so many parameters: arrays of their size, and the
    times of passes over them. What stays in a cache between two passes of an
    optimizer and nothing else is counted as cached, so that a small model's
    floor is lower than memory would allow: in training other data come between."""

    def __init__(self, optimizer: str, elements: int, element: int = 4) -> None:
        assert _floor_pass is not None
        self.optimizer, self.elements, self.element = optimizer, elements, element
        self.lines = max(1, elements * element // LINE)
        count = 1 + WRITTEN[optimizer]
        self.arrays = [torch.ones(self.lines * LINE, dtype=torch.uint8) for _ in range(count)]
        addresses = [array.data_ptr() for array in self.arrays]
        self._gradient = addresses[0]
        self._written = (ctypes.c_void_p * (count - 1))(*addresses[1:])
        self.ms: dict[bool, list[float]] = {False: [], True: []}  # by: gradient in the cache

    def run(self, cached: bool = False, passes: int = 1) -> None:
        gradient = None if cached else self._gradient
        threads = torch.get_num_threads()
        _floor_pass(gradient, self._written, len(self._written), self.lines, threads, passes)

    def sample(self) -> None:
        """Times one pass of each kind."""
        self.run()  # brings in what fits the caches
        for cached, ms in self.ms.items():
            begin = time.perf_counter()
            self.run(cached)
            ms.append((time.perf_counter() - begin) * 1e3)

    def gb_per_s(self, cached: bool = False) -> float:
        moved = bytes_each(self.optimizer, self.element, cached) * self.elements
        return moved / median(self.ms[cached]) / 1e6

    def __str__(self) -> str:
        parts = [
            f"{bytes_each(self.optimizer, self.element, cached)} bytes{what}"
            f" {median(self.ms[cached]):.3f} ms ({self.gb_per_s(cached):.1f} GB/s)"
            for cached, what in ((False, ""), (True, ", gradient in the cache,"))
        ]
        return f"floor of {self.elements:,} parameters: {'; '.join(parts)}"
