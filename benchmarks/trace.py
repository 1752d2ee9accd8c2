# SPDX-License-Identifier: BSD-3-Clause
"""Draws docs/trace.svg: one iteration of a small model as torch.profiler has recorded it, with the
stock optimizer and with both kinds of fusion.

    .venv/bin/python benchmarks/trace.py docs/trace.svg"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

import optfuse

WAYS = {"stock": "", "forward fusion": "forward", "backward fusion": "backward"}
COLOURS = {"forward": "#3b6fb5", "backward": "#7a55a8", "step": "#808a94", "update": "#d9822b"}
WARM_UP, ITERATIONS = 5, 100
WIDTH, LEFT, BAR, LANE, ROW, THIN = 1100, 190, 22, 27, 122, 3


@dataclass(frozen=True)
class Range:
    """A range of a trace; in microseconds."""

    name: str
    start: float
    end: float

    def is_in(self, other: Range) -> bool:
        return other.start <= self.start and self.end <= other.end


def model() -> nn.Sequential:
    torch.manual_seed(0)
    sizes = {"embed": (256, 512), "first": (512, 512), "second": (512, 512), "head": (512, 128)}
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for name, (inputs, outputs) in sizes.items():
        layers[name] = nn.Linear(inputs, outputs)
        if name != "head":
            layers[f"after_{name}"] = nn.GELU()
    return nn.Sequential(layers)


def recorded(mode: str) -> list[Range]:
    """All ranges of one iteration, of the exported trace."""
    net = model()
    optimizer = torch.optim.AdamW(net.named_parameters(), lr=1e-3, fused=True)
    if mode:
        optimizer = optfuse.fuse(optimizer, mode=mode)
    x, y = torch.randn(8, 256), torch.randint(128, (8,))

    def iterate() -> None:
        with record_function("iteration"):
            with record_function("forward"):
                loss = nn.functional.cross_entropy(net(x), y)
            with record_function("backward"):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(WARM_UP):
        iterate()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(ITERATIONS):
            iterate()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    found = [Range(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X"]
    whole = [r for r in found if r.name == "iteration"]
    fastest = min(whole, key=lambda r: r.end - r.start)  # nothing else ran on this core
    return [r for r in found if r.is_in(fastest)]


def update_of(name: str) -> str | None:
    """The label of an update in the picture."""
    if found := re.search(r"^optfuse::\w+ parameter '(.+?)'.*?( and \d+ more)?$", name):
        return found[1] + (found[2] or "").replace(" and ", " + ").replace(" more", "")
    return "all parameters" if name.startswith("aten::_fused_") else None


def outermost(ranges: list[Range], inside: Range) -> Iterator[Range]:
    end = inside.start
    for r in sorted(ranges, key=lambda r: (r.start, -r.end)):
        if r.is_in(inside) and r != inside and r.start >= end:
            end = r.end
            yield r


def operator(name: str) -> str:
    """Short: Linear's are addmm in backward."""
    name = name.removeprefix("autograd::engine::evaluate_function: ")
    return name.removeprefix("aten::").removesuffix("Backward0")


class Picture:
    """One row for each way."""

    def __init__(self, microseconds: float) -> None:
        self.lines: list[str] = []
        self.scale = (WIDTH - LEFT - 10) / microseconds

    def text(self, x: float, y: float, words: str, fill: str, rest: str = "") -> None:
        place = f'x="{min(x, WIDTH - 6 * len(words)):.1f}" y="{y:.0f}" fill="{fill}"{rest}'
        self.lines.append(f"<text {place}>{escape(words)}</text>")

    def span(self, r: Range, origin: float) -> tuple[float, float]:
        """Where its bar begins, and its width."""
        return LEFT + (r.start - origin) * self.scale, (r.end - r.start) * self.scale

    def bar(self, r: Range, origin: float, y: int, kind: str, words: str) -> None:
        x, width = self.span(r, origin)
        self.lines.append(
            f'<rect x="{x:.1f}" y="{y}" width="{max(width, 1):.1f}" height="{BAR}" rx="2" '
            f'fill="{COLOURS[kind]}"><title>{escape(r.name)}, {r.end - r.start:.0f} us'
            "</title></rect>"
        )
        self.label(r, origin, y, words, "#1b1b1b" if kind == "update" else "#ffffff")

    def label(self, r: Range, origin: float, y: int, words: str, fill: str) -> None:
        """Writes it into the bar, if it fits."""
        x, width = self.span(r, origin)
        if width > 6.2 * len(words):
            self.text(x + width / 2, y + 15, words, fill, ' text-anchor="middle"')

    def operators(self, found: list[Range], origin: float, y: int, kind: str) -> None:
        spans = [self.span(r, origin) for r in found]
        bars = "".join(f"M{x:.1f} {y}v{BAR}h{max(width, 1):.1f}v-{BAR}z" for x, width in spans)
        self.lines.append(f'<path fill="{COLOURS[kind]}" opacity="0.45" d="{bars}"/>')
        for r in found:
            self.label(r, origin, y, operator(r.name), "#1b1b1b")

    def labels(self, updates: list[Range], origin: float, y: int) -> None:
        """Writes the labels of updates below them; at another height where they would meet."""
        free = [0.0] * 4
        for r in updates:
            (x, width), words = self.span(r, origin), str(update_of(r.name))
            if not THIN < width < 6.2 * len(words):
                continue  # its name is in the bar, or only in its tooltip
            row = next((i for i, end in enumerate(free) if end <= x), len(free) - 1)
            free[row] = x + 6 * len(words) + 6
            self.text(x, y + 12 + 12 * row, words, "#b5651d")

    def row(self, way: str, ranges: list[Range], y: int) -> None:
        whole = next(r for r in ranges if r.name == "iteration")
        self.text(8, y + 15, way, "#5a6570", ' font-weight="600"')
        for i, lane in enumerate(("ranges", "operators", "updates")):
            self.text(LEFT - 8, y + 15 + i * LANE, lane, "#808a94", ' text-anchor="end"')
        updates = sorted((r for r in ranges if update_of(r.name)), key=lambda r: r.start)
        for phase in ("forward", "backward", "step"):
            r = next(r for r in ranges if r.name.removeprefix("Optimizer.").startswith(phase))
            words = "step()" if phase == "step" else phase
            self.bar(r, whole.start, y, phase, words)
            found = list(outermost([o for o in ranges if o not in updates], r))
            self.operators(found, whole.start, y + LANE, phase)
        for u in updates:
            self.bar(u, whole.start, y + 2 * LANE, "update", str(update_of(u.name)))
        self.labels(updates, whole.start, y + 2 * LANE + BAR)

    def svg(self, height: int) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="11" '
            'role="img" aria-labelledby="t">\n<!-- SPDX-License-Identifier: BSD-3-Clause -->\n'
            '<title id="t">One iteration in torch.profiler: updates in step(), in the forward '
            "pass, and in the backward pass</title>\n"
        )
        return head + "\n".join(self.lines) + "\n</svg>\n"


def main() -> None:
    torch.set_num_threads(1)  # a thread that waits would make bars longer
    traces = {way: recorded(mode) for way, mode in WAYS.items()}
    spans = [next(r for r in ranges if r.name == "iteration") for ranges in traces.values()]
    picture = Picture(max(span.end - span.start for span in spans))
    for i, (way, ranges) in enumerate(traces.items()):
        picture.row(way, ranges, 10 + i * ROW)
    Path(sys.argv[1]).write_text(picture.svg(10 + len(traces) * ROW), "utf-8")


if __name__ == "__main__":
    main()
