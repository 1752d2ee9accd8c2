# SPDX-License-Identifier: BSD-3-Clause
"""Draws docs/paper-batch.svg, -share.svg and -layers.svg from results/paper-1-thread.json.

.venv/bin/python benchmarks/paper_figures.py docs"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gallery import COLOURS, DARK, GREY, PALE, text

RESULTS = Path(__file__).resolve().parent / "results"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 380, 230, 46, 12, 34, 40
BACKWARD, FORWARD, FUSED = "backward fusion", "forward fusion", "fused=True"
COLOUR = {BACKWARD: COLOURS["backward"], FORWARD: COLOURS["forward"], FUSED: COLOURS["fused=True"]}
SHOWN = (FUSED, FORWARD, BACKWARD)

Interval = dict[str, float]


@dataclass(frozen=True)
class Point:
    x: float
    y: Interval
    kind: str
    word: str = ""  # beside it


@dataclass(frozen=True)
class Plot:
    title: str
    x: str  # what the axis is
    points: list[Point]
    ticks: Sequence[float]
    by_doubling: bool  # the axis has a logarithmic scale
    joined: bool = True

    def place(self, x: float) -> float:
        low, high = self.scale(min(self.ticks)), self.scale(max(self.ticks))
        room = WIDTH - LEFT - RIGHT
        return LEFT + room * (0.05 + 0.9 * (self.scale(x) - low) / (high - low))

    def scale(self, x: float) -> float:
        return math.log2(x) if self.by_doubling else x


def step_of(highest: float) -> float:
    """A round distance of at most five lines."""
    rough = highest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= rough)


def drawn(plot: Plot, left: float, top: float) -> list[str]:
    lowest = min(0.0, *(p.y["low"] for p in plot.points))
    highest = max(p.y["high"] for p in plot.points)
    step = step_of(highest - lowest)
    base, end = math.floor(lowest / step) * step, math.ceil(highest / step) * step
    room = HEIGHT - TOP - BOTTOM

    def height(y: float) -> float:
        return TOP + room * (end - y) / (end - base)

    middle = ' text-anchor="middle"'
    lines = [f'<g transform="translate({left:.0f} {top:.0f})">']
    lines.append(text(LEFT, 16, plot.title, DARK, ' font-weight="600"'))
    for i in range(round((end - base) / step) + 1):
        y = base + i * step
        grid = f"M{LEFT} {height(y):.1f}H{WIDTH - RIGHT}"
        lines.append(f'<path d="{grid}" stroke="{GREY if y == 0 else PALE}"/>')
        lines.append(text(LEFT - 6, height(y) + 4, f"{y:g}", GREY, ' text-anchor="end"'))
    for tick in plot.ticks:
        lines.append(text(plot.place(tick), HEIGHT - BOTTOM + 16, f"{tick:g}", GREY, middle))
    lines.append(text((LEFT + WIDTH) / 2, HEIGHT - 6, plot.x, GREY, middle))
    for kind in SHOWN:
        found = sorted((p for p in plot.points if p.kind == kind), key=lambda p: p.x)
        ends = [(plot.place(p.x), height(p.y["median"])) for p in found]
        if plot.joined and len(ends) > 1:
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in ends)
            lines.append(f'<path d="M{path}" fill="none" stroke="{COLOUR[kind]}"/>')
        for point, (x, y) in zip(found, ends, strict=True):
            bar = f"M{x:.1f} {height(point.y['low']):.1f}V{height(point.y['high']):.1f}"
            lines.append(f'<path d="{bar}" stroke="{COLOUR[kind]}"/>')
            lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOUR[kind]}"/>')
            if point.word:
                lines.append(text(x + 5, y - 4, point.word, GREY, ' font-size="9"'))
    return [*lines, "</g>"]


def picture(title: str, plots: list[Plot]) -> str:
    """Plots side by side, two in a row, and the names of the kinds below."""
    wide, high = min(2, len(plots)) * WIDTH, math.ceil(len(plots) / 2) * HEIGHT + 26
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
        'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" '
        'role="img" aria-labelledby="t">',
        "<!-- SPDX-License-Identifier: BSD-3-Clause -->",
        f'<title id="t">{title}</title>',
        f'<rect width="{wide}" height="{high}" rx="4" fill="#ffffff" stroke="{PALE}"/>',
    ]
    for i, plot in enumerate(plots):
        lines += drawn(plot, i % 2 * WIDTH, i // 2 * HEIGHT)
    for i, kind in enumerate(SHOWN):
        x = LEFT + i * 125
        lines.append(f'<circle cx="{x}" cy="{high - 14}" r="4" fill="{COLOUR[kind]}"/>')
        lines.append(text(x + 9, high - 10, kind, DARK))
    return "\n".join([*lines, "</svg>", ""])


def points(x: float, row: dict[str, Any], key: str, word: str = "") -> list[Point]:
    kinds = [kind for kind in SHOWN if kind in row["variants"]]
    return [
        Point(x, row["variants"][kind][key], kind, word if kind == kinds[-1] else "")
        for kind in kinds
    ]


def batch(results: dict[str, Any]) -> str:
    rows = list(results["batch"].values())
    plots = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of = [row for row in rows if row["model"] == model]
        marks = [p for row in of for p in points(row["batch"], row, "saves_ms")]
        title = f"{model}: ms saved of the loop's iteration"
        plots.append(Plot(title, "samples", marks, [row["batch"] for row in of], True))
    return picture("Milliseconds that an iteration saves, by the number of samples", plots)


def share(results: dict[str, Any]) -> str:
    rows = results["share"]
    marks = [
        p
        for name, row in rows.items()
        for p in points(100 * row["share"]["median"], row, "by_loop", name)
    ]
    ticks = range(0, 101, 20)
    title = "times as fast as the loop"
    plot = Plot(title, "% of an iteration that the loop's step() takes", marks, ticks, False, False)
    return picture("How much faster an iteration is, by the optimizer's share of it", [plot])


def layers(results: dict[str, Any]) -> str:
    rows = results["layers"].values()
    marks = [p for row in rows for p in points(row["parameters"], row, "by_loop")]
    ticks = [row["parameters"] for row in rows]
    plot = Plot("times as fast as the loop", "parameters of a layer", marks, ticks, True)
    return picture("How much faster an iteration is, by the size of layers", [plot])


DRAWINGS: dict[str, Callable[[dict[str, Any]], str]] = {
    "paper-batch.svg": batch,
    "paper-share.svg": share,
    "paper-layers.svg": layers,
}


def main() -> None:
    results = json.loads((RESULTS / "paper-1-thread.json").read_text("utf-8"))
    for name, draw in DRAWINGS.items():
        Path(sys.argv[1], name).write_text(draw(results), "utf-8")


if __name__ == "__main__":
    main()
