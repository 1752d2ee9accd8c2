# SPDX-License-Identifier: BSD-3-Clause
"""AdamW's updates of weights that every thread has just read, as in backward: stored
as usual, and past the caches. It depends on how far the cores are from each other."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from console import columns, title
from cores import Distances
from resample import of_medians

from optfuse._ab.result import Interval

LAYERS, ELEMENTS, ARRAYS = 12, 1 << 20, 4
# What is read before, and how the kernel stores.
CASES = {
    "nobody has read them": (False, False),
    "all have, stored as usual": (True, False),
    "all have, stored past the caches": (True, True),
}


@dataclass(frozen=True)
class SharedWeights:
    where: str
    rounds: int
    core_ns: float
    ms: dict[str, Interval]


def _open() -> Any:
    """The function, where benchmarks/run has built it, or None."""
    path = Path(os.environ.get("OPTFUSE_BUILD", "")) / "benchmarks" / "libshared_weights.so"
    try:
        function = ctypes.CDLL(str(path)).shared_weights_ms
    except OSError:
        return None
    function.restype = ctypes.c_double
    function.argtypes = [
        ctypes.c_void_p,
        *[ctypes.c_size_t] * 2,
        *[ctypes.c_bool] * 2,
        ctypes.c_int,
    ]
    return function


def shared_weights(rounds: int) -> list[SharedWeights] | None:
    """Prints the table; one row for each place the cores were in."""
    title(f"AdamW of {LAYERS} x {ELEMENTS:,} weights that all threads have just read, ms")
    function, threads = _open(), torch.get_num_threads()
    if function is None or threads == 1:
        print(
            "not measured: " + ("one thread" if function else "libshared_weights.so was not built")
        )
        return None
    tensors = [torch.ones(ELEMENTS) for _ in range(LAYERS * ARRAYS)]
    arrays = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    ms: dict[str, list[float]] = {name: [] for name in CASES}
    distances = Distances()
    for i in range(rounds):
        for name in list(CASES)[i % len(CASES) :] + list(CASES)[: i % len(CASES)]:
            ms[name].append(function(arrays, LAYERS, ELEMENTS, *CASES[name], threads))
        distances.sample()
    found = [
        SharedWeights(
            where or "near",
            len(at),
            distances.median_ns(at),
            {name: of_medians(lambda x: x, [of[i] for i in at]) for name, of in ms.items()},
        )
        for where, at in (distances.places() if distances.ns else {}).items()
    ]
    if not found:
        print("not measured: where the cores are is not known, or was too seldom the same")
        return None
    rows = [("", "rounds", *CASES)]
    rows += [(one.where, str(one.rounds), *map(str, one.ms.values())) for one in found]
    print(columns(rows))
    return found
