# SPDX-License-Identifier: BSD-3-Clause
"""Draws docs/gallery-faults.svg and docs/gallery-wide.svg from results/promises.json.

.venv/bin/python benchmarks/gallery.py docs"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

RESULTS = Path(__file__).resolve().parent / "results" / "promises.json"
DEEP, WIDE = "mlp 4 x 4096, batch 8", "mlp 4 x 2048, batch 16"
MALLOC, KEPT = "default malloc", "memory kept"
# The kinds of results/promises.json, as the pictures call them; promises are fuse()'s default.
NAMES = {
    "fused=True": "fused=True",
    "forward fusion": "forward, products off",
    "backward fusion": "backward, products off",
    "forward, promises": "forward fusion",
    "backward, promises": "backward fusion",
}
COLOURS = {"fused=True": "#808a94", "forward": "#3b6fb5", "backward": "#7a55a8"}
GREY, DARK, PALE = "#5a6570", "#1b1b1b", "#e3e6e9"
WIDTH, LEFT, RIGHT, BAR, STEP = 760, 190, 190, 18, 25


@dataclass(frozen=True)
class Bar:
    """low, high: the 95 % interval, where there is one."""

    kind: str
    value: float
    low: float | None
    high: float | None
    words: str

    def colour(self) -> str:
        return COLOURS[NAMES[self.kind].partition(" ")[0].rstrip(",")]


@dataclass(frozen=True)
class Panel:
    title: str
    bars: list[Bar]


def text(x: float, y: float, words: str, fill: str = GREY, rest: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.0f}" fill="{fill}"{rest}>{escape(words)}</text>'


def intervals(panel: Panel, scale: float, y: int) -> list[str]:
    """One path has those of all bars that have one."""
    lines = [
        f"M{LEFT + bar.low * scale:.1f} {y + i * STEP + BAR / 2:.1f}H{LEFT + bar.high * scale:.1f}"
        for i, bar in enumerate(panel.bars)
        if bar.low is not None and bar.high is not None
    ]
    return [f'<path d="{"".join(lines)}" stroke="{DARK}" stroke-width="1.5"/>'] if lines else []


def drawn(bar: Bar, scale: float, y: int) -> list[str]:
    width = bar.value * scale
    found = [text(LEFT - 8, y + 13, NAMES[bar.kind], DARK, ' text-anchor="end"')]
    faint = ' fill-opacity="0.45"' if "products off" in NAMES[bar.kind] else ""
    place = f'x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}"'
    found.append(f'<rect {place} rx="2" fill="{bar.colour()}"{faint}/>')
    end = LEFT + (width if bar.high is None else bar.high * scale)
    return [*found, text(end + 8, y + 13, bar.words)]


def picture(title: str, panels: list[Panel]) -> str:
    """Panels with one unit have one scale: each title ends with its unit."""
    lines, y = [], 20
    for panel in panels:
        alike = [p for p in panels if p.title.split()[-1] == panel.title.split()[-1]]
        widest = max(bar.high or bar.value for p in alike for bar in p.bars)
        lines.append(text(8, y, panel.title, DARK, ' font-weight="600"'))
        y, scale = y + 10, (WIDTH - LEFT - RIGHT) / widest
        marks = intervals(panel, scale, y)
        for bar in panel.bars:
            lines += drawn(bar, scale, y)
            y += STEP
        lines += marks
        y += 22
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y - 20}" '
        'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="12" '
        'role="img" aria-labelledby="t">\n<!-- SPDX-License-Identifier: BSD-3-Clause -->\n'
        f'<title id="t">{escape(title)}</title>\n'
        f'<rect width="{WIDTH}" height="{y - 20}" rx="4" fill="#ffffff" stroke="{PALE}"/>\n'
    )
    return head + "\n".join(lines) + "\n</svg>\n"


def timed(kinds: dict[str, Any], faults: bool) -> list[Bar]:
    found = []
    for kind in NAMES:
        ms, count = kinds[kind]["ms"], kinds[kind]["faults"]
        words = f"{ms['median']:.1f} ms" + f", {count:,.0f} page faults" * faults
        found.append(Bar(kind, ms["median"], ms["low"], ms["high"], words))
    return found


def page_faults(results: dict[str, Any]) -> str:
    given = results["speed"][DEEP]
    titles = {MALLOC: "malloc as it is, ms", KEPT: "memory kept by malloc, ms"}
    panels = [Panel(title, timed(given[way]["kinds"], True)) for way, title in titles.items()]
    return picture("Page faults of an iteration, with malloc as it is and with memory kept", panels)


def wide_layer(results: dict[str, Any]) -> str:
    memory = results["memory"][WIDE]
    sizes = {kind: memory[kind]["tensors_mb"] for kind in NAMES}
    bars = [Bar(kind, mb, None, None, f"{mb:.1f} MB") for kind, mb in sizes.items()]
    times = timed(results["speed"][WIDE][MALLOC]["kinds"], False)
    panels = [Panel("an iteration, ms", times), Panel("peak of tensors, MB", bars)]
    return picture("Wide layers: the time of an iteration and peak memory", panels)


PICTURES = {"gallery-faults.svg": page_faults, "gallery-wide.svg": wide_layer}


def main() -> None:
    results = json.loads(RESULTS.read_text("utf-8"))
    for name, draw in PICTURES.items():
        Path(sys.argv[1], name).write_text(draw(results), "utf-8")


if __name__ == "__main__":
    main()
