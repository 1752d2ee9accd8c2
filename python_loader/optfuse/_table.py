# SPDX-License-Identifier: BSD-3-Clause
"""Tables of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def aligned(cells: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; its first row is the head."""
    rows = list(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
