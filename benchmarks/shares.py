# SPDX-License-Identifier: BSD-3-Clause
"""What an iteration is made of: the rest and the optimizer, and how many times
the optimizer's floor it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from bytes_alone import IN_BACKWARD
from console import columns
from floor import Floor
from resample import of_medians
from table import NONE

from optfuse._ab.result import Comparison, Interval


@dataclass(frozen=True)
class Share:
    """One variant. The optimizer's time is what the iteration takes more than
    without an optimizer."""

    name: str
    rest_ms: float
    optimizer_ms: Interval
    of_iteration: Interval
    floor_ms: float | None
    of_floor: Interval | None  # 1: nothing could be faster; below: other work has gained

    def cells(self) -> tuple[str, ...]:
        part = self.of_iteration
        return (
            self.name,
            f"{self.rest_ms:.2f}",
            str(self.optimizer_ms),
            f"{100 * part.median:.0f} % [{100 * part.low:.0f}, {100 * part.high:.0f}]",
            str(self.of_floor or ""),
        )


HEAD = ("", "rest, ms", "+ optimizer, ms", "of the iteration", "x floor")


def shares(comparison: Comparison, rounds: Sequence[int], floor: Floor | None) -> list[Share]:
    """One for each variant that has an optimizer. Backward fusion may find the
    gradient in the cache: its floor is without it."""
    series = {row.name: row.rounds_ms for row in comparison.rows if row.ms is not None}
    if NONE not in series:
        return []
    rest = series.pop(NONE)
    without = [rest[i] for i in rounds]
    found = []
    for name, ms in series.items():
        own = [ms[i] for i in rounds]
        least = None
        if floor is not None:
            cached = name in ("backward fusion", IN_BACKWARD)
            least = [floor.ms[cached][i] for i in rounds]
        found.append(_share(name, own, without, least))
    return found


def _share(
    name: str, own: Sequence[float], without: Sequence[float], least: Sequence[float] | None
) -> Share:
    of_floor = None
    if least is not None:
        of_floor = of_medians(lambda o, w, f: (o - w) / f, own, without, least)
    return Share(
        name,
        median(without),
        of_medians(lambda o, w: o - w, own, without),
        of_medians(lambda o, w: (o - w) / o, own, without),
        None if least is None else median(least),
        of_floor,
    )


def share_table(found: list[Share], floor: Floor | None) -> str:
    return "\n".join(
        [*([str(floor)] if floor else []), columns([HEAD, *(one.cells() for one in found)])]
    )
