# SPDX-License-Identifier: BSD-3-Clause
"""The comparison as one HTML file, which loads nothing else, with plots as SVG by matplotlib where
it is installed."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from statistics import median
from typing import Any

from optfuse_tools.script_ab.result import AS_WRITTEN, Comparison, Row

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { border-bottom: 1px solid #ccc; padding: .3em .9em .3em 0; text-align: left; }
.verdict { font-size: 1.15em; border-left: 4px solid #4c78a8; padding-left: .8em; }
svg { max-width: 100%; height: auto; }
"""

#: One a variant, whichever others are there; the one with PyTorch's flags has the last.
COLORS = {
    AS_WRITTEN: "#888888",
    "forward fusion": "#f58518",
    "backward fusion": "#54a24b",
    "": "#4c78a8",
}
POINTS = 400  # of a line


def page(compared: Comparison) -> str:
    title = f"optfuse ab: {compared.script}"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            f'<head><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{_STYLE}</style></head>",
            f"<body><h1>{escape(title)}</h1>",
            f'<p class="verdict">{escape(compared.verdict)}</p>',
            *_table(compared.cells()),
            *(f"<p>{escape(sentence)}</p>" for sentence in compared.legend()),
            *_figures(compared),
            f"<p>{escape(_settings(compared))}</p>",
            "</body></html>\n",
        ]
    )


def _table(cells: list[list[str]]) -> Iterator[str]:
    yield "<table>"
    for kind, row in zip(["th", *["td"] * len(cells)], cells, strict=False):
        yield f"<tr>{''.join(f'<{kind}>{_cell(cell)}</{kind}>' for cell in row)}</tr>"
    yield "</table>"


def _cell(text: str) -> str:
    """A number and its interval stay in one line."""
    return re.sub(r"(?<=[\d,]) (?=[\[\d])", "\u00a0", escape(text))


def _figures(compared: Comparison) -> Iterator[str]:
    try:
        yield from (f"<figure>{svg}</figure>" for svg in plots(compared))
    except NoMatplotlib:
        yield "<p>Plots need matplotlib: <code>pip install matplotlib</code>.</p>"


def _settings(compared: Comparison) -> str:
    known = {name: value for name, value in compared.settings.items() if value is not None}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in known.items())


class NoMatplotlib(Exception):
    """It is not installed."""


def plots(compared: Comparison) -> Iterator[str]:
    """Each an <svg> element. Raises NoMatplotlib."""
    rows = [row for row in compared.rows if not row.note]
    height = 0.8 + 0.45 * len(rows)
    yield _svg("rounds", height, lambda axes: _rounds(axes, rows))
    yield _svg("steps", 3.5, lambda axes: _steps(axes, rows, compared.settings["warm_up"]))
    yield _svg("memory", height, lambda axes: _memory(axes, rows))


def _svg(name: str, height: float, draw: Callable[[Any], None]) -> str:
    """name: with which the ids in it begin, so that several fit into one page."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib from error
    stream = io.StringIO()
    with rc_context({"svg.hashsalt": "optfuse", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9.0, height), layout="constrained")
        draw(figure.subplots())
        figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text[text.index("<svg") :])


def _colored(rows: Sequence[Row]) -> Iterator[tuple[int, Row, str]]:
    for i, row in enumerate(rows):
        yield i, row, COLORS.get(row.name, COLORS[""])


def _rounds(axes: Any, rows: Sequence[Row]) -> None:
    for i, row, color in _colored(rows):
        axes.barh(i, median(row.rounds_ms), color=color, alpha=0.5)
        axes.plot(row.rounds_ms, [i] * len(row.rounds_ms), "o", color=color, markersize=4)
    _label(axes, rows, "ms an iteration, each round and their median")


def _steps(axes: Any, rows: Sequence[Row], warm_up: int) -> None:
    """Medians of neighbours, where there are more steps than points. A step in which the machine
    did something else would press all lines down: it is cut off."""
    top = 3.0 * max((median(row.steps_ms) for row in rows), default=1.0)
    cut = False
    for _, row, color in _colored(rows):
        width = -(-len(row.steps_ms) // POINTS)
        starts = range(0, len(row.steps_ms), width)
        values = [median(row.steps_ms[i : i + width]) for i in starts]
        axes.plot([i + 2 for i in starts], values, color=color, label=row.name, linewidth=1)
        cut |= max(values) > top
    axes.axvspan(2, 2 + warm_up, color="#dddddd", label="warm-up")
    axes.set(xlabel="step", ylabel="ms (higher steps are cut off)" if cut else "ms", ylim=(0, top))
    axes.legend(fontsize=8)


def _memory(axes: Any, rows: Sequence[Row]) -> None:
    for i, row, color in _colored(rows):
        axes.barh(i, row.peak_mb, color=color, alpha=0.5)
        if row.peak_gpu_mb is not None:
            axes.barh(i, row.peak_gpu_mb, color=color, height=0.4)
    on_gpu = any(row.peak_gpu_mb is not None for row in rows)
    _label(axes, rows, "peak MB of the process" + (" and, narrow, of the GPU" if on_gpu else ""))


def _label(axes: Any, rows: Sequence[Row], text: str) -> None:
    axes.set(xlabel=text, yticks=range(len(rows)), yticklabels=[row.name for row in rows])
    axes.invert_yaxis()
