# SPDX-License-Identifier: BSD-3-Clause
"""The comparison as one HTML file, which loads nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from optfuse_tools.script_ab.plots import NoMatplotlib, plots
from optfuse_tools.script_ab.result import Comparison

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { border-bottom: 1px solid #ccc; padding: .3em .9em .3em 0; text-align: left; }
.verdict { font-size: 1.15em; border-left: 4px solid #4c78a8; padding-left: .8em; }
svg { max-width: 100%; height: auto; }
"""


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
