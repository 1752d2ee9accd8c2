# SPDX-License-Identifier: BSD-3-Clause
"""From the rounds of one cell to figures: medians, 95 % bootstrap intervals, tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch
from bytes_alone import FLOORS
from torch import Tensor
from variants import HOOK_VARIANTS

from optfuse_tools.ab.interval import RESAMPLES, Interval, median_interval
from optfuse_tools.ab.result import Comparison, Row

FUSED, DEFAULT, NONE = "fused=True", "default", "no optimizer"
OURS = ("backward fusion", "forward fusion")
CURVE_END = 20  # iterations whose mean loss is the end of the loss curve


def of_medians(formula: Callable[..., Tensor], *series: Sequence[float]) -> Interval:
    """The formula of the medians of these series. They hold the same rounds, and rounds are
    drawn again together, so that what disturbed one disturbs all."""
    times = torch.tensor(series, dtype=torch.float64)
    rounds = times.shape[1]
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(rounds, (RESAMPLES, rounds), generator=generator)
    drawn = formula(*times[:, picks].quantile(0.5, dim=2))
    low, high = drawn.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return Interval(formula(*times.quantile(0.5, dim=1)).item(), low.item(), high.item())


def share(
    fused: Sequence[float], own: Sequence[float], without: Sequence[float]
) -> Interval | None:
    """(fused - ours) / (fused - no optimizer); None where the interval of stock's cost
    includes 0."""
    if of_medians(lambda f, w: f - w, fused, without).low <= 0:
        return None
    return of_medians(lambda f, o, w: (f - o) / (f - w), fused, own, without)


@dataclass(frozen=True)
class Line:
    """One variant in one cell. Ratios are taken round by round."""

    name: str
    ms: Interval
    against_fused: Interval  # fused=True's time by this one's
    against_default: Interval | None
    cost_ms: Interval | None  # what an iteration takes above one without an optimizer
    recovered: Interval | None  # the share of fused=True's cost that this one saves; of bytes
    # alone, the most that fusion could save
    loss: float | None
    same_curve: bool  # every loss equals fused=True's
    equal_bits: bool | None  # the parameters at the end, too
    page_faults: float | None  # an iteration
    host_ms: Interval | None  # on a GPU


def lines(comparison: Comparison, rounds: Sequence[int]) -> list[Line]:
    """One line for each variant that ran, from these rounds; of the Python hooks the fastest
    form."""
    able = {row.name: row for row in comparison.rows if row.ms is not None}
    series = {name: [row.rounds_ms[i] for i in rounds] for name, row in able.items()}
    hooks = [name for name in HOOK_VARIANTS if name in able]
    for slower in sorted(hooks, key=lambda name: median(series[name]))[1:]:
        del able[slower]
    return [_line(row, able[FUSED], series, rounds) for row in able.values()]


def _line(row: Row, fused: Row, series: dict[str, list[float]], rounds: Sequence[int]) -> Line:
    own, theirs, without = series[row.name], series[FUSED], series.get(NONE)

    def ratio(of: Sequence[float]) -> Interval:
        return median_interval([a / b for a, b in zip(of, own, strict=True)])

    cost = recovered = None
    if without is not None and row.name != NONE:
        cost = of_medians(lambda o, w: o - w, own, without)
        if row.name.endswith(("fusion", *FLOORS)):
            recovered = share(theirs, own, without)
    trains = row.name not in (NONE, *FLOORS)
    return Line(
        name=row.name,
        ms=median_interval(own),
        against_fused=ratio(theirs),
        against_default=ratio(series[DEFAULT]) if DEFAULT in series else None,
        cost_ms=cost,
        recovered=recovered,
        loss=fmean(row.losses[-CURVE_END:]) if trains and row.losses else None,
        same_curve=row.losses == fused.losses,
        equal_bits=row.equal_bits,
        page_faults=median(row.rounds_faults[i] for i in rounds) if row.rounds_faults else None,
        host_ms=row.host_ms,
    )


def title(text: str) -> None:
    progress("")
    print(f"\n{text}", flush=True)


def progress(message: str) -> None:
    """One line that overwrites itself; nothing where nobody watches."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{message}", end="", file=sys.stderr, flush=True)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head, the first column stands at the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


HEAD = ("", "ms an iteration", "x fused", "x default", "above no optimizer", "recovered")
HEAD += ("loss", "curve", "faults", "host")


def table(found: Iterable[Line]) -> str:
    return columns([HEAD, *map(_cells, found)])


def _cells(line: Line) -> tuple[str, ...]:
    curve = "= (weights differ)" if line.equal_bits is False else "="
    curve = curve if line.same_curve else "differs"
    return (
        line.name,
        str(line.ms),
        str(line.against_fused),
        str(line.against_default or ""),
        str(line.cost_ms or ""),
        str(line.recovered or ""),
        "" if line.loss is None else f"{line.loss:.4f}",
        "" if line.loss is None else curve,
        "" if line.page_faults is None else f"{line.page_faults:.0f}",
        f"{line.host_ms.median:.2f}" if line.host_ms else "",
    )


def verdict(found: Iterable[Line], name: str) -> str:
    """All cells in one line: where it is slower than stock, what it recovers of stock's cost."""
    ours = [line for line in found if line.name == name]
    slower = sum(line.against_fused.high < 1 for line in ours)
    shares = sorted(line.recovered.median for line in ours if line.recovered)
    text = f"{name}: measurably slower than {FUSED} in {slower} of {len(ours)} cells"
    if shares:
        text += f"; recovers {median(shares):.2f} of its cost, at least {shares[0]:.2f}"
        text += f" (median of the {len(shares)} cells where it costs anything)"
    return text
