# SPDX-License-Identifier: BSD-3-Clause
"""All cells in a few lines: what is recovered of stock's cost, and how many
times as fast an iteration is where the batch is 1."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Protocol

from table import Line

OURS = ("backward fusion", "forward fusion")


class HasLines(Protocol):
    lines: list[Line]
    where: str


def verdict(cells: Iterable[HasLines]) -> list[str]:
    """Cells measured on cores far from each other are summed up by themselves."""
    cells = list(cells)
    places = dict.fromkeys(one.where for one in cells)
    return [line for where in places for line in _of([c for c in cells if c.where == where])]


def _of(cells: list[HasLines]) -> list[str]:
    place = f", {cells[0].where}" if cells[0].where else ""
    said = []
    for name in OURS:
        ours = {str(c): line for c in cells for line in c.lines if line.name == name}
        known = {cell: line.recovered for cell, line in ours.items() if line.recovered}
        if known:
            worst = min(known, key=lambda cell: known[cell].median)
            said.append(
                f"{name}{place}: recovered {median(r.median for r in known.values()):.2f} (median"
                f" of {len(known)} cells of {len(ours)}; the others' fused=True costs nothing that"
                f" can be told), lowest {known[worst]} in {worst}"
            )
        first = [line for cell, line in ours.items() if "batch 1" in cell.split(", ")]
        if first:
            said.append(
                f"{name}{place}: at batch 1, {median(x.against_fused.median for x in first):.2f}"
                f" times as fast as fused=True and"
                f" {median(x.against_default.median for x in first):.2f} times as the default"
                f" (medians of {len(first)} cells)"
            )
    return said
