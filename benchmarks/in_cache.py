# SPDX-License-Identifier: BSD-3-Clause
"""The kernels on one core, with their data in its second-level cache, against
what bounds them there: the bytes that pass through the cache, or the divider,
which works at one division or square root at a time while all other arithmetic
runs beside it. Both are measured, in turns with the kernels."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from console import columns, title
from floor import Floor
from interleave import in_turn
from resample import of_medians

from optfuse._ab.result import Interval

AIM = 1.2  # times the bound
DTYPES = {torch.float32: 0, torch.float64: 1}  # of_dtype


@dataclass(frozen=True)
class Case:
    optimizer: str
    rule: str  # of the C table
    dtype: torch.dtype
    # What an element asks of the divider. (AdamW has another division, by a
    # number that is known before: three multiplications do it.)
    divisions: int
    roots: int


CASES = (
    Case("adamw", "adam", torch.float32, 1, 1),
    Case("adamw", "adam", torch.float64, 1, 1),
    Case("momentum", "sgd", torch.float32, 0, 0),
    Case("momentum", "sgd", torch.float64, 0, 0),
)


@dataclass(frozen=True)
class InCache:
    optimizer: str
    dtype: str
    update_ns: Interval  # an element
    moving_ns: Interval
    divider_ns: Interval
    times: Interval  # the update, of the larger of the two

    @property
    def bound(self) -> str:
        return "divider" if self.divider_ns.median > self.moving_ns.median else "cache"


def _open() -> Any:
    """The library, where benchmarks/run has built it, or None."""
    path = Path(os.environ.get("OPTFUSE_BUILD", "")) / "benchmarks" / "libin_cache.so"
    try:
        library = ctypes.CDLL(str(path))
    except OSError:
        return None
    for name in ("in_cache_division", "in_cache_root", "in_cache_update"):
        getattr(library, name).restype = ctypes.c_double
    library.in_cache_update.argtypes = [
        ctypes.c_char_p, ctypes.c_int, ctypes.POINTER(ctypes.c_size_t),
    ]  # fmt: skip
    return library


def moving_ns(case: Case, elements: int) -> float:
    floor = Floor(case.optimizer, elements, case.dtype.itemsize)
    passes = 200
    tries = in_turn({"": lambda: floor.run(passes=passes)}, 20, {"": 1})[""]
    return min(tries) * 1e3 / passes / elements


def measure(library: Any, case: Case, rounds: int) -> InCache:
    dtype, elements = DTYPES[case.dtype], ctypes.c_size_t()
    series: tuple[list[float], ...] = ([], [], [])
    for _ in range(rounds):
        update = library.in_cache_update(case.rule.encode(), dtype, ctypes.byref(elements))
        divider = 0.0
        if case.divisions:
            divider += case.divisions * library.in_cache_division(dtype)
        if case.roots:
            divider += case.roots * library.in_cache_root(dtype)
        moving = moving_ns(case, elements.value)
        for found, ns in zip(series, (update, moving, divider), strict=True):
            found.append(ns)
    one = [of_medians(lambda ns: ns, found) for found in series]
    times = of_medians(lambda u, m, d: u / torch.maximum(m, d), *series)
    return InCache(case.optimizer, str(case.dtype).removeprefix("torch."), *one, times)


def in_cache(rounds: int) -> list[InCache] | None:
    """Prints the table, on one thread."""
    title("Kernels alone in the second-level cache of one core, ns an element")
    library = _open()
    if library is None:
        print("not measured: libin_cache.so was not built")
        return None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = [measure(library, case, rounds) for case in CASES]
    torch.set_num_threads(threads)
    rows = [("", "update", "cache", "divider", "x the bound", f"at most {AIM}")]
    for one in found:
        verdict = "yes" if one.times.median <= AIM else "NO"
        ns = (f"{x.median:.3f}" for x in (one.update_ns, one.moving_ns, one.divider_ns))
        rows.append((f"{one.optimizer} {one.dtype}", *ns, f"{one.times} ({one.bound})", verdict))
    print(columns(rows))
    return found
