# SPDX-License-Identifier: BSD-3-Clause
"""Sections cells and grid: whole iterations of training, all variants interleaved."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

import torch
from bytes_alone import FLOORS, bytes_alone
from cells import GRID_CELLS, cells_of, training
from figures import OURS, Line, lines, progress, table, title, verdict
from variants import few_variants, variants

import optfuse
from optfuse_tools.ab.variants import BuildFn, Wrap

ROUND_TRIPS = 2000
FAR_NS = 80.0  # more than two cores that share a cache need
FEWEST = 10  # rounds in one place that are worth a table of their own
APART = "no shared cache"
MOST, GRID_ROUNDS = 400, 30
COMPILING = 60.0  # seconds of a cell beside its rounds, if a step() has to be compiled


class Distances:
    """Nanoseconds a cache line takes between the first two cores: sample() before the first
    round and after each. Empty on one thread, and where benchmarks/run has built nothing."""

    def __init__(self) -> None:
        path = Path(os.environ.get("OPTFUSE_BUILD", "")) / "benchmarks" / "libcore_distance.so"
        self.ns: list[float] = []
        self.cpus = sorted(os.sched_getaffinity(0))[:2]
        self.library = None
        if path.is_file() and len(self.cpus) == 2 and torch.get_num_threads() > 1:
            self.library = ctypes.CDLL(str(path))
            self.library.core_distance.restype = ctypes.c_double
        self.sample()

    def sample(self) -> None:
        if self.library:
            before = os.sched_getaffinity(0)
            self.ns.append(self.library.core_distance(*self.cpus, ROUND_TRIPS))
            os.sched_setaffinity(0, before)  # of this thread

    def places(self) -> dict[str, list[int]]:
        """Round numbers by where the cores were: "" where they share a cache. A virtual machine
        may move them in the middle of a cell; such a round is in neither place."""
        pairs = list(zip(self.ns, self.ns[1:], strict=False))
        near = [i for i, pair in enumerate(pairs) if max(pair) <= FAR_NS]
        apart = [i for i, pair in enumerate(pairs) if min(pair) > FAR_NS]
        found = {"": near, APART: apart}
        return {where: rounds for where, rounds in found.items() if len(rounds) >= FEWEST}

    def median_ns(self, rounds: list[int]) -> float:
        return median(self.ns[i + 1] for i in rounds)


class AnyCell(Protocol):
    """A dataclass; its text names it."""

    @property
    def device(self) -> str: ...
    @property
    def iterations(self) -> int: ...


@dataclass(frozen=True)
class Measured:
    cell: AnyCell
    where: str  # "", or that the cores share no cache
    core_ns: float | None  # median distance of the first two cores
    rounds: int
    lines: list[Line]

    def __str__(self) -> str:
        return f"{self.cell} ({self.where})" if self.where else str(self.cell)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self.cell), **asdict(self), "cell": str(self)}


CellT = TypeVar("CellT")


def in_time(cells: Sequence[CellT], chosen: Any) -> Iterator[CellT]:
    for i, cell in enumerate(cells):
        if time.monotonic() > chosen.until:
            title(f"left out for want of time: {', '.join(map(str, cells[i:]))}")
            return
        yield cell


def cells(chosen: Any) -> dict[str, Any]:
    """The usual cells: every implementation there is, as many rounds as fit the seconds."""
    seconds = chosen.seconds + (COMPILING if chosen.compiled else 0.0)
    found: list[Measured] = []
    for cell in in_time(cells_of(chosen, chosen.quick), chosen):
        wraps = variants(cell.device, chosen.compiled)
        build = training(cell, chosen.optimizer)
        found += compare(chosen, cell, build, wraps, chosen.rounds or MOST, seconds)
    return {"cells": [one.to_dict() for one in found]}


def grid(chosen: Any) -> dict[str, Any]:
    """Five models, three batches each, with the floor: as many rounds for each cell."""
    wraps = {**few_variants(), **bytes_alone(chosen.optimizer)}
    chosen_cells = [c for c in GRID_CELLS if not chosen.model or c.model in chosen.model]
    found: list[Measured] = []
    for cell in in_time(chosen_cells, chosen):
        build = training(cell, chosen.optimizer)
        found += compare(chosen, cell, build, wraps, chosen.rounds or GRID_ROUNDS, None)
    lines_of_all = [line for one in found for line in one.lines]
    said = [verdict(lines_of_all, name) for name in (*OURS, *FLOORS)]
    title("\n".join(said))
    return {"verdict": said, "cells": [one.to_dict() for one in found]}


def compare(
    chosen: Any,
    cell: AnyCell,
    build: BuildFn,
    wraps: Mapping[str, Wrap],
    rounds: int,
    seconds: float | None,
) -> list[Measured]:
    distances = Distances()

    def each_round(message: str) -> None:
        progress(f"{cell}: {message}")
        distances.sample()

    compared = optfuse.ab(
        build,
        variants=wraps,
        rounds=rounds,
        iterations=cell.iterations,
        seconds=seconds,
        progress=each_round,
    )
    chosen.raw_rounds[str(cell)] = compared.to_dict()
    everything = list(range(compared.settings["rounds"]))
    places = distances.places() if cell.device == "cpu" else {}
    found = []
    for where, picked in (places or {"": everything}).items():
        core_ns = distances.median_ns(picked) if distances.ns else None
        one = Measured(cell, where, core_ns, len(picked), lines(compared, picked))
        found.append(one)
        title(f"{one}: {one.rounds} rounds" + (f", {core_ns:.0f} ns apart" if core_ns else ""))
        print(table(one.lines))
    for row in compared.rows:
        if row.note:
            print(f"{row.name} left out: {row.note}")
    return found
