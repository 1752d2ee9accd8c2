# SPDX-License-Identifier: BSD-3-Clause
"""Where ab() is: a line on a terminal that overwrites itself, and nothing in a log."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable


class Progress:
    """Tells the caller's function of each round, or, without one, the terminal of all."""

    def __init__(self, told: Callable[[str], None] | None) -> None:
        self._told = told
        self._seen = told is None and sys.stderr is not None and sys.stderr.isatty()
        self._began = 0.0  # when the first round did

    def show(self, text: str) -> None:
        """On a terminal, in place of what is shown there."""
        if self._seen:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)

    def warm_up(self, name: str) -> None:
        self.show(f"optfuse.ab: warm-up of {name}")

    def begin(self) -> None:
        self._began = time.perf_counter()
        self.show("optfuse.ab: the first round")

    def round(self, done: int, rounds: int, deadline: float) -> None:
        text = f"round {done} of {rounds}"
        if self._told is not None:
            self._told(text)
            return
        now = time.perf_counter()
        left = min((now - self._began) / done * (rounds - done), max(deadline - now, 0.0))
        self.show(f"optfuse.ab: {text}, about {left:.0f} s left")

    def clear(self) -> None:
        self.show("")
