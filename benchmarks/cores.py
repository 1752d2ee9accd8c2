# SPDX-License-Identifier: BSD-3-Clause
"""How far apart the first two cores are, sampled between the rounds of a cell."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROUND_TRIPS = 2000
FAR_NS = 80.0  # more than cores of one chip need
FEWEST = 10  # rounds in either place that are worth a table of their own


def _open() -> Any:
    """The build is where benchmarks/run says; None if it isn't."""
    path = Path(os.environ.get("OPTFUSE_BUILD", "")) / "benchmarks" / "libcore_distance.so"
    if not path.is_file():
        return None
    function = ctypes.CDLL(str(path)).core_distance
    function.argtypes = [ctypes.c_int] * 3
    function.restype = ctypes.c_double
    return function


_core_distance = _open()


class Distances:
    """Nanoseconds a cache line takes between the first two cores: sample()
    once before the first round and once after each."""

    def __init__(self) -> None:
        self.ns: list[float] = []
        self.sample()

    def sample(self) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        if _core_distance is not None and len(cpus) > 1 and torch.get_num_threads() > 1:
            self.ns.append(_core_distance(cpus[0], cpus[1], ROUND_TRIPS))

    def places(self) -> dict[str, list[int]]:
        """Round numbers by where the cores were. A virtual machine may be moved
        in the middle of a cell; a round in which it was is in neither."""
        pairs = list(zip(self.ns, self.ns[1:], strict=False))
        near = [i for i, pair in enumerate(pairs) if max(pair) <= FAR_NS]
        far = [i for i, pair in enumerate(pairs) if min(pair) > FAR_NS]
        if len(far) < FEWEST:
            return {"": near} if len(near) >= FEWEST else {}
        return {"": near, "far cores": far} if len(near) >= FEWEST else {"far cores": far}

    def median_ns(self, rounds: list[int]) -> float:
        return median(self.ns[i + 1] for i in rounds)
