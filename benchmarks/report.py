# SPDX-License-Identifier: BSD-3-Clause
"""What the benchmark leaves behind: a JSON file, a plot, a table for the README."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from cells import Cell
from micro import Cost
from shares import Share
from table import CURVE_END, DEFAULT, FUSED, NONE, Line
from updates import Update
from variants import COMPILED, FOR_LOOP, FOREACH, HOOK_VARIANTS

import optfuse
from optfuse._ab.result import Comparison

OURS = ("backward fusion", "forward fusion")


@dataclass
class Measured:
    cell: Cell
    comparison: Comparison
    where: str  # "", or "far cores"
    core_ns: float | None  # median distance of the first two cores
    rounds: list[int]  # those that count here
    lines: list[Line]
    shares: list[Share] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.cell}, {self.where}" if self.where else str(self.cell)


@dataclass
class Results:
    settings: dict[str, Any]
    load: float = field(default_factory=lambda: os.getloadavg()[0])  # before the first cell
    cells: list[Measured] = field(default_factory=list)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)  # cell -> variant -> bytes
    costs: list[Cost] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)


def machine() -> dict[str, Any]:
    """What the figures depend on; nothing that names the machine."""
    optimizer = optfuse.fuse(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "gpu": gpu,
        "cuda": torch.version.cuda or "none",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "optfuse": optfuse.__version__,
        "optfuse_isa": optfuse.summary(optimizer).isa["float32"],
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write_json(results: Results, path: Path) -> None:
    cells = [
        {
            **asdict(one.cell),
            "where": one.where,
            "core_distance_ns": one.core_ns,
            "rounds_used": one.rounds,
            "lines": [asdict(line) for line in one.lines],
            "shares": [asdict(share) for share in one.shares],
        }
        for one in results.cells
    ]
    comparisons = {str(one.cell): one.comparison.to_dict() for one in results.cells}
    whole = {
        "machine": machine(),
        "settings": results.settings,
        "load_before": results.load,
        "cells": cells,
        "comparisons": comparisons,
        "peak_memory_bytes": results.memory,
        "costs": [asdict(cost) for cost in results.costs],
        "updates": [asdict(update) for update in results.updates],
    }
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def markdown(results: Results) -> str:
    """A row for each cell: median ms, and ours against fused=True."""
    on_gpu = results.settings["device"] == "cuda"
    other = [FOR_LOOP, COMPILED] if on_gpu else [FOREACH]
    names = [NONE, DEFAULT, *other, FUSED, "Python hooks", *OURS]
    head = ["model, batch", *names, "backward x fused", "forward x fused"]
    digits = 2 if on_gpu else 1
    rows = [head, ["---"] * len(head)]
    for one in results.cells:
        found = {_plain(line.name): line for line in one.lines}
        ms = [f"{found[name].ms.median:.{digits}f}" if name in found else "-" for name in names]
        gain = [str(found[name].against_fused) if name in found else "-" for name in OURS]
        rows.append([str(one), *ms, *gain])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _plain(name: str) -> str:
    return HOOK_VARIANTS[0] if name in HOOK_VARIANTS else name


def plot(results: Results, path: Path) -> None:
    """Above, speed against fused=True in each cell; below, the loss curves."""
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is missing: there is no plot")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = {one.cell.model: one.comparison for one in reversed(results.cells)}
    models = list(dict.fromkeys(one.cell.model for one in results.cells))
    figure = pyplot.figure(figsize=(13, 8), layout="constrained")
    grid = figure.add_gridspec(2, len(models), height_ratios=(3, 2))
    _plot_speed(figure.add_subplot(grid[0, :]), results)
    for i, model in enumerate(models):
        _plot_curves(figure.add_subplot(grid[1, i]), model, first[model])
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _plot_speed(axes: Any, results: Results) -> None:
    shown = {DEFAULT: "0.75", FOREACH: "0.6", FOR_LOOP: "0.6", COMPILED: "tab:green"}
    shown |= {"Python hooks": "tab:olive", OURS[0]: "tab:blue", OURS[1]: "tab:orange", NONE: "0.9"}
    there = {_plain(line.name) for one in results.cells for line in one.lines}
    names = [name for name in shown if name in there]
    colors = [shown[name] for name in names]
    width = 0.8 / len(names)
    for i, (name, color) in enumerate(zip(names, colors, strict=True)):
        at, height, below, above = [], [], [], []
        for x, one in enumerate(results.cells):
            for speed in (line.against_fused for line in one.lines if _plain(line.name) == name):
                at.append(x + (i - len(names) / 2 + 0.5) * width)
                height.append(speed.median)
                below.append(max(0.0, speed.median - speed.low))
                above.append(max(0.0, speed.high - speed.median))
        error = {"elinewidth": 0.8, "ecolor": "black"}
        axes.bar(at, height, width, yerr=[below, above], error_kw=error, color=color, label=name)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xticks(range(len(results.cells)), [_wrapped(one) for one in results.cells])
    axes.set_ylabel(f"speed of an iteration, {FUSED} = 1")
    axes.set_title(f"{results.settings['optimizer']} float32, torch {torch.__version__}")
    axes.legend(ncols=len(names), fontsize="small", loc="upper left")


def _wrapped(one: Measured) -> str:
    return str(one).replace(", ", "\n")


def _plot_curves(axes: Any, model: str, comparison: Comparison) -> None:
    styles = {FUSED: ("black", 3.0), OURS[0]: ("tab:blue", 1.6), OURS[1]: ("tab:orange", 0.8)}
    for row in comparison.rows:
        if row.name in styles and row.ms is not None:
            color, width = styles[row.name]
            losses = torch.tensor(row.losses)
            smooth = losses.unfold(0, min(CURVE_END, len(losses)), 1).mean(1)
            axes.plot(smooth, color=color, linewidth=width, label=row.name)
    axes.set_title(model)
    axes.set_xlabel("iteration")
    axes.set_ylabel(f"loss, mean of {CURVE_END}")
    axes.legend(fontsize="x-small")
