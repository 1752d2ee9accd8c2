# SPDX-License-Identifier: BSD-3-Clause
"""From the rounds of one cell to the figures of the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from bytes_alone import FLOORS
from resample import share
from variants import HOOK_VARIANTS

from optfuse._ab.result import Comparison, Interval, Row, median_interval

FUSED, DEFAULT, NONE = "fused=True", "default", "no optimizer"
CURVE_END = 20  # iterations whose mean loss is the end of the loss curve
HEAD = (
    "",
    "ms an iteration",
    "x fused",
    "x default",
    "saved ms",
    "recovered",
    "loss",
    "curve",
    "faults",
    "host",
)


@dataclass(frozen=True)
class Line:
    """One variant in one cell. Ratios are taken round by round."""

    name: str
    ms: Interval
    against_fused: Interval  # fused=True's time by this one's
    against_default: Interval
    saved_ms: Interval  # against fused=True
    recovered: Interval | None  # of what fused=True costs over no optimizer, if it costs
    # anything; of bytes alone, what fusion could recover at most
    loss: float
    same_curve: bool  # every loss equals fused=True's
    equal_bits: bool | None  # the parameters at the end, too
    page_faults: float  # an iteration
    host_ms: Interval | None  # on a GPU
    device_ms: Interval | None


def only(row: Row, rounds: Sequence[int]) -> Row:
    """The same with some of its rounds."""
    times = [row.rounds_ms[i] for i in rounds]
    faults = [row.rounds_faults[i] for i in rounds]
    return replace(row, ms=median_interval(times), rounds_ms=times, rounds_faults=faults)


def lines(comparison: Comparison, rounds: Sequence[int]) -> list[Line]:
    """One line for each variant that ran, from these rounds; of the Python
    hooks the faster form."""
    able = {row.name: only(row, rounds) for row in comparison.rows if row.ms is not None}
    hooks = [able[name] for name in HOOK_VARIANTS if name in able]
    for slower in sorted(hooks, key=_median)[1:]:
        del able[slower.name]
    return [_line(row, able) for row in able.values()]


def _median(row: Row) -> float:
    assert row.ms is not None
    return row.ms.median


def _line(row: Row, rows: dict[str, Row]) -> Line:
    assert row.ms is not None and row.page_faults is not None
    own, fused = row.rounds_ms, rows[FUSED].rounds_ms
    recovered = None
    if row.name.endswith(("fusion", *FLOORS)) and NONE in rows:
        recovered = share(fused, own, rows[NONE].rounds_ms)
    return Line(
        name=row.name,
        ms=row.ms,
        against_fused=median_interval(_ratios(fused, own)),
        against_default=median_interval(_ratios(rows[DEFAULT].rounds_ms, own)),
        saved_ms=median_interval([f - o for f, o in zip(fused, own, strict=True)]),
        recovered=recovered,
        loss=fmean(row.losses[-CURVE_END:]),
        same_curve=row.losses == rows[FUSED].losses,
        equal_bits=row.equal_bits,
        page_faults=row.page_faults,
        host_ms=row.host_ms,
        device_ms=row.device_ms,
    )


def _ratios(theirs: Sequence[float], own: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(theirs, own, strict=True)]


def cells_of(line: Line) -> tuple[str, ...]:
    trains = line.name not in (NONE, *FLOORS)
    curve = "=" if line.same_curve else "differs"
    if line.equal_bits is False and line.same_curve:
        curve = "= (weights differ)"
    return (
        line.name,
        str(line.ms),
        str(line.against_fused),
        str(line.against_default),
        f"{line.saved_ms.median:+.2f}",
        str(line.recovered) if line.recovered else "",
        f"{line.loss:.4f}" if trains else "",
        curve if trains else "",
        f"{line.page_faults:.0f}",
        f"{line.host_ms.median:.2f}" if line.host_ms else "",
    )


def text_table(rows: list[Line]) -> str:
    cells = [HEAD, *map(cells_of, rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEAD))]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    )
    return "\n".join(line.rstrip() for line in padded)
