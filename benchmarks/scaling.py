# SPDX-License-Identifier: BSD-3-Clause
"""What the optimizer adds to an iteration, against the number of tensors, their
size and the number of threads; and whether it jumps where the code changes its
way: at the end of a chunk, where threads begin, where a bucket is full."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from bare import COMPARED, FUSED, NONE, Run, iteration
from console import columns, progress, title
from floor import WRITTEN, Floor, available
from interleave import in_turn
from resample import of_medians

from optfuse._ab.result import Interval

COUNTS = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)  # tensors
SMALL = 64  # elements of each
SIZES = tuple(10**i for i in range(9))  # elements of one tensor
# (tensors, elements) before and after. Whole vectors, so that no scalar tail
# comes or goes: a chunk and the beginning of threads (plugin/cpu_launch.c), and the
# least that ATen gives a thread.
EDGES = {
    "a chunk": ((1, 2048), (1, 2064)),
    "threads begin": ((1, 16368), (1, 16384)),
    "ATen's grain": ((1, 32768), (1, 32784)),
    "threads begin, many": ((255, SMALL), (256, SMALL)),
    "threads begin, more": ((510, SMALL), (512, SMALL)),
}
FLOOR = "floor"
ROUND_US = 20_000.0  # what a case takes of a round, if one run takes less
FEWEST, MOST = 3, 25  # rounds
STEP = 0.25  # of the cost: a jump
SLOW_MS = 10_000.0  # a first iteration; no more tensors after one


@dataclass(frozen=True)
class Point:
    threads: int
    tensors: int
    elements: int  # of each
    us: dict[str, Interval]  # an iteration, above that without an optimizer
    first_ms: dict[str, float]  # the first iteration, all of it: it makes the state


@dataclass(frozen=True)
class Jump:
    edge: str
    threads: int
    variant: str
    us: Interval  # more than the further elements are worth
    cost: float

    @property
    def is_step(self) -> bool:
        return self.us.low > 0 and self.us.median > STEP * self.cost


def cases_of(optimizer: str, tensors: int, elements: int) -> dict[str, Callable[[], object]]:
    cases: dict[str, Callable[[], object]] = {
        name: iteration(optimizer, name, tensors, elements) for name in COMPARED
    }
    if available and optimizer in WRITTEN:
        cases[FLOOR] = Floor(optimizer, tensors * elements).run
    return cases


def timed(cases: dict[Any, Callable[[], object]], seconds: float) -> dict[Any, list[float]]:
    """As many rounds as fit, each case long enough to be told."""
    once = {}
    for key, run in cases.items():
        run()
        begin = perf_counter()
        run()
        once[key] = (perf_counter() - begin) * 1e6
    repeats = {key: max(1, int(ROUND_US / us)) for key, us in once.items()}
    each = sum((repeats[key] + 1) * us for key, us in once.items())
    rounds = max(FEWEST, min(MOST, int(seconds * 1e6 / each)))
    return in_turn(cases, rounds, repeats)


def point(optimizer: str, tensors: int, elements: int, seconds: float) -> Point:
    cases = cases_of(optimizer, tensors, elements)
    first_ms = {name: 1e3 * run.first for name, run in cases.items() if isinstance(run, Run)}
    times = timed(cases, seconds)
    us = {}
    for name, own in times.items():
        if name == FLOOR:
            us[name] = of_medians(lambda o: o, own)
        elif name != NONE:
            us[name] = of_medians(lambda o, w: o - w, own, times[NONE])
    return Point(torch.get_num_threads(), tensors, elements, us, first_ms)


def jumps(optimizer: str, edge: str, seconds: float) -> list[Jump]:
    """Both sides in the same rounds. Of further tensors their share is expected."""
    before, after = EDGES[edge]
    cases = {
        (side, name): iteration(optimizer, name, *where)
        for side, where in enumerate((before, after))
        for name in COMPARED
    }
    times = timed(cases, seconds)
    more = after[0] / before[0] - 1  # tensors
    found = []
    for name in COMPARED[1:]:
        old, new, rest = times[0, name], times[1, name], times[0, NONE]
        jump = of_medians(lambda o, n: n - o - more * o, old, new)
        cost = of_medians(lambda o, r: o - r, old, rest).median
        found.append(Jump(edge, torch.get_num_threads(), name, jump, cost))
    return found


def table(points: list[Point], by_tensors: bool) -> str:
    """Beside each cost what a further tensor (in us) or element (in ns) adds:
    along a straight line that stays the same."""
    names = list(points[0].us)
    unit = "us a tensor" if by_tensors else "ns an element"
    head = ["threads", "tensors" if by_tensors else "elements"]
    for name in names:
        head += [f"{name}, us", unit]
    rows = [head]
    before: Point | None = None
    for one in points:
        row = [str(one.threads), f"{one.tensors if by_tensors else one.elements:,}"]
        for name in names:
            row += [f"{one.us[name].median:.1f}", slope(before, one, name)]
        rows.append(row)
        before = one
    return columns(rows)


def slope(before: Point | None, one: Point, name: str) -> str:
    if before is None or before.threads != one.threads:
        return ""
    more = one.us[name].median - before.us[name].median
    if one.tensors != before.tensors:
        return f"{more / (one.tensors - before.tensors):.3f}"
    return f"{1e3 * more / (one.elements - before.elements):.3f}"


def jump_table(found: list[Jump]) -> str:
    rows = [("edge", "threads", "variant", "jump, us", "cost before, us", "")]
    for one in found:
        step = "STEP" if one.is_step else ""
        rows.append((one.edge, str(one.threads), one.variant, str(one.us), f"{one.cost:.1f}", step))
    return columns(rows)


def over_counts(optimizer: str, counts: list[int], seconds: float) -> list[Point]:
    found: list[Point] = []
    for n in counts:
        if found and max(found[-1].first_ms.values()) > SLOW_MS:
            title(f"left out: {n:,} tensors; see the first iteration of {found[-1].tensors:,}")
            break
        progress(f"scaling: {n} tensors, {torch.get_num_threads()} threads")
        found.append(point(optimizer, n, SMALL, seconds))
    return found


def first_table(points: list[Point]) -> str:
    """A first iteration that costs more for each tensor the more there are is
    not a straight line."""
    names = list(points[0].first_ms)
    rows = [["threads", "tensors", *(f"{name}, ms" for name in names)]]
    for one in points:
        ms = [f"{one.first_ms[name]:.1f}" for name in names]
        rows.append([str(one.threads), f"{one.tensors:,}", *ms])
    return columns(rows)


def section(chosen: Any) -> dict[str, Any]:
    """On one thread and on as many as PyTorch was given."""
    seconds = 0.05 if chosen.smoke else 2.0 if chosen.quick else 6.0
    limit = 300 if chosen.smoke else 10_000 if chosen.quick else max(SIZES)
    every = torch.get_num_threads()
    counts: list[Point] = []
    sizes: list[Point] = []
    found: list[Jump] = []
    for threads in sorted({1, every}):
        torch.set_num_threads(threads)
        counts += over_counts(chosen.optimizer, [n for n in COUNTS if n <= limit], seconds)
        for n in SIZES:
            if n <= limit * 100:
                progress(f"scaling: {n} elements, {threads} threads")
                sizes.append(point(chosen.optimizer, 1, n, seconds))
        for edge in EDGES:
            progress(f"scaling: {edge}, {threads} threads")
            found += jumps(chosen.optimizer, edge, seconds)
    torch.set_num_threads(every)
    title(f"{chosen.optimizer}, us an iteration above no optimizer; tensors of {SMALL} elements")
    print(table(counts, by_tensors=True))
    title("The first iteration, which makes the state")
    print(first_table(counts))
    title("One tensor")
    print(table(sizes, by_tensors=False))
    title(f"Jumps where the code changes its way; STEP: more than {STEP:.0%} of the cost")
    print(jump_table(found))
    if not chosen.no_plot:
        plot(chosen, counts, sizes)
    return {
        "tensors": [asdict(one) for one in counts],
        "elements": [asdict(one) for one in sizes],
        "jumps": [{**asdict(one), "step": one.is_step} for one in found],
    }


def plot(chosen: Any, counts: list[Point], sizes: list[Point]) -> None:
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is missing: there is no plot")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    colors = {FUSED: "black", "backward fusion": "tab:blue", "forward fusion": "tab:orange"}
    figure, sides = pyplot.subplots(1, 2, figsize=(13, 6), layout="constrained")
    for axes, points, what in zip(sides, (counts, sizes), ("tensors", "elements"), strict=True):
        for threads in sorted({one.threads for one in points}):
            some = [one for one in points if one.threads == threads]
            for name in some[0].us:
                at = [getattr(one, what) for one in some]
                # A logarithm has no place for a cost that can't be told from nothing.
                us = [one.us[name].median if one.us[name].low > 0 else None for one in some]
                style = "--" if threads == 1 else "-"
                label = f"{name}, {threads} thread{'s' if threads > 1 else ''}"
                axes.loglog(at, us, style, color=colors.get(name, "0.6"), marker=".", label=label)
        axes.set_xlabel(f"{what} ({'64 elements each' if what == 'tensors' else 'one tensor'})")
        axes.set_ylabel("us an iteration above no optimizer")
        axes.legend(fontsize="small")
    chosen.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(chosen.out / f"scaling-{chosen.optimizer}.png", dpi=120)
    pyplot.close(figure)
