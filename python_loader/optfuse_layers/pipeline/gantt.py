# SPDX-License-Identifier: BSD-3-Clause
"""Gantt charts, by matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, NamedTuple

from optfuse._library.bindings import Error

COLORS = {
    "forward": "#4c78a8",
    "input_gradient": "#f58518",
    "second_input_gradient": "#ffbf79",
    "weight_gradient": "#54a24b",
    "update": "#b279a2",
}
_LABELLED = 1 / 100  # of the chart's width: narrower bars have no room for a number


class Bar(NamedTuple):
    process: int
    kind: str
    batch: int
    start: float  # seconds
    end: float


def _figure(height: float) -> Any:
    """Without pyplot, which would choose a backend for the whole process."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Error(
            "optfuse: a Gantt chart needs matplotlib, which is not installed: "
            "`pip install matplotlib`, or print the plan"
        ) from error
    return Figure(figsize=(12.0, height), layout="constrained")


def draw(path: str | PathLike[str], title: str, processes: int, bars: Sequence[Bar]) -> None:
    """One row a process, one bar a task with its batch's number. path: its ending says the
    format. Raises optfuse.Error without matplotlib."""
    figure = _figure(1.2 + 0.5 * processes)
    axes = figure.subplots()
    width = max((bar.end for bar in bars), default=0.0)
    for kind, color in COLORS.items():
        rows = [bar for bar in bars if bar.kind == kind]
        if rows:
            axes.barh(
                [bar.process for bar in rows],
                [1e3 * (bar.end - bar.start) for bar in rows],
                left=[1e3 * bar.start for bar in rows],
                color=color,
                edgecolor="white",
                linewidth=0.3,
                label=kind.replace("_", " "),
            )
    for bar in bars:
        if bar.end - bar.start > _LABELLED * width:
            middle = 1e3 * (bar.start + bar.end) / 2
            axes.text(middle, bar.process, str(bar.batch), ha="center", va="center", fontsize=7)
    axes.set(title=title, xlabel="ms", ylabel="process", yticks=range(processes))
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=len(COLORS), fontsize=8)
    figure.savefig(path)
