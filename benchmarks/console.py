# SPDX-License-Identifier: BSD-3-Clause
"""What the benchmark says while it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def progress(message: str) -> None:
    """One line that overwrites itself; nothing where nobody watches."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{message}", end="", file=sys.stderr, flush=True)


def title(text: str) -> None:
    progress("")
    print(f"\n{text}", flush=True)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head. Numbers stand at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
