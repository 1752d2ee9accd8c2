# SPDX-License-Identifier: BSD-3-Clause
"""The runs that take the time, interleaved, so that whatever disturbs the machine disturbs all."""

from __future__ import annotations

import random
import time
from statistics import median
from typing import Any

from optfuse_tools.ab.page_faults import Usage
from optfuse_tools.ab.progress import Progress
from optfuse_tools.script_ab.child import Run, Script, Variant, run
from optfuse_tools.script_ab.result import AS_WRITTEN, Row
from optfuse_tools.script_ab.runs import checked, why_left_out


def warm_up(intervals: int) -> int:
    """How many of the first iterations are not counted."""
    return max(2, min(10, intervals // 4))


class Times:
    """Fills in the figures of rows."""

    def __init__(self, script: Script, progress: Progress, written: dict[str, Any]) -> None:
        """written: what a run as written has found."""
        steps = [one["steps"] for one in written["optimizers"]]
        self._clock = steps.index(max(steps))  # the optimizer whose steps are the iterations
        self.warm_up = warm_up(max(steps) - 1)
        self.counted = max(steps) - 1 - self.warm_up  # iterations of a run
        self._script = script
        self._progress = progress
        self._began = 0.0

    def take(self, rows: list[Row], variants: dict[str, Variant], rounds: int) -> None:
        """Rows whose run fails are left out from there on. Raises CannotCompare if it is that as
        written."""
        order = random.Random(self._script.seed)
        steps: dict[str, list[list[float]]] = {row.name: [] for row in rows}
        self._began = time.perf_counter()
        for number in range(rounds):
            able = [row for row in rows if not row.note]
            order.shuffle(able)
            for i, row in enumerate(able):
                self._say(number + i / len(able), rounds, row.name)
                done = run(self._script, variants[row.name], False, self._progress.tick)
                steps[row.name] += self._taken(row, variants[row.name], done)
        for row in rows:
            row.steps_ms = [median(each) for each in zip(*steps[row.name], strict=False)]

    def _say(self, done: float, rounds: int, name: str) -> None:
        """done: rounds, and a part of one."""
        left = (time.perf_counter() - self._began) / done * (rounds - done) if done else None
        about = "" if left is None else f", about {left:.0f} s left"
        self._progress.show(f"optfuse ab: round {int(done) + 1} of {rounds}, {name}{about}")

    def _taken(self, row: Row, variant: Variant, done: Run) -> list[list[float]]:
        """The milliseconds of a run's iterations, once or not at all."""
        if row.name == AS_WRITTEN:
            checked(self._script, done)
        row.note = why_left_out(self._script, variant, done)
        if row.note or done.found is None:
            return []
        ms: list[float] = done.found["ms"][self._clock]
        row.rounds_ms.append(median(ms[self.warm_up :]))
        row.rounds_peak_mb.append(done.found["peak_mb"])
        used = done.found["used"][self._clock]
        row.used.add(Usage(*used[self.warm_up]), Usage(*used[-1]))
        if done.found["peak_gpu_mb"] is not None:
            row.rounds_peak_gpu_mb.append(done.found["peak_gpu_mb"])
        return [ms]
