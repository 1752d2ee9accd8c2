# SPDX-License-Identifier: BSD-3-Clause
"""The place where ab() is: a line on a terminal that overwrites itself, or, in a log, a line every
ten seconds."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable

SECONDS = 10.0  # between two lines of a log


class Progress:
    """Tells the caller's function of each round, or, without one, standard error of all."""

    def __init__(self, told: Callable[[str], None] | None) -> None:
        self._told = told
        self._stream = sys.stderr if told is None else None
        self._overwrites = self._stream is not None and self._stream.isatty()
        self._text = ""
        self._began = time.perf_counter()
        self._said = self._began  # when the log got its last line
        self._first_round = self._began

    def show(self, text: str) -> None:
        """In place of what was shown."""
        self._text = text
        if self._overwrites:
            width = shutil.get_terminal_size().columns - 1
            self._write(f"\r\x1b[K{text[:width]}")
        else:
            self.tick()

    def tick(self, text: str = "") -> None:
        """Called now and then. A log gets the text, or the last one, every ten seconds."""
        now = time.perf_counter()
        if not self._overwrites and now - self._said >= SECONDS:
            self._said = now
            self._write(f"{text or self._text} (after {now - self._began:.0f} s)\n")

    def _write(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text)
            self._stream.flush()

    def warm_up(self, name: str) -> None:
        self.show(f"optfuse.ab: warm-up of {name}")

    def begin(self) -> None:
        self._first_round = time.perf_counter()
        self.show("optfuse.ab: the first round")

    def round(self, done: int, rounds: int, deadline: float) -> None:
        text = f"round {done} of {rounds}"
        if self._told is not None:
            self._told(text)
            return
        now = time.perf_counter()
        left = (now - self._first_round) / done * (rounds - done)
        left = min(left, max(deadline - now, 0.0))
        self.show(f"optfuse.ab: {text}, about {left:.0f} s left")

    def clear(self) -> None:
        if self._overwrites:
            self.show("")
