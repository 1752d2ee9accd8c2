# SPDX-License-Identifier: BSD-3-Clause
"""Instructions that the machinery around an update takes, counted by valgrind's
callgrind. Unlike times they hardly change from run to run or with what else
the machine does. docs/performance.md has the budgets and what was learned."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import callgrind
import launch_gpu
from console import columns, title

PARAMETERS = 1000


@dataclass(frozen=True)
class Part:
    """Counts to add and to take away, by the names of counted.py."""

    what: str
    plus: tuple[str, ...]
    minus: tuple[str, ...] = ()
    budget: int | None = None


PARTS = (
    Part("gradient hook, above the update", ("backward, backward fusion",),
         ("backward, no optimizer", "flush"), 8000),
    Part("gradient hook, with the update", ("backward, backward fusion",),
         ("backward, no optimizer",), 9500),
    Part("first use by detach, above the update", ("detach, pending",),
         ("detach, nothing pending", "flush"), 2000),
    Part("first use by detach, with the update", ("detach, pending",),
         ("detach, nothing pending",), 3500),
    Part("first use by view, with the update", ("view, pending",),
         ("view, nothing pending",), 2500),
    Part("step() in forward mode, in C", ("step in C",), (), 2800),
    Part("step() in forward mode, in all", ("step",), (), 5200),
    Part("step() in backward mode, in all", ("step, backward fusion",), (), 400),
    Part("the update itself, launched by flush()", ("flush",), (), 1600),
    Part("step() of fused=True, with the update", ("step, fused=True",)),
)  # fmt: skip


@dataclass(frozen=True)
class Count:
    what: str
    instructions: float  # a parameter
    budget: int | None

    def cells(self) -> tuple[str, ...]:
        verdict = ""
        if self.budget is not None:
            verdict = "within" if self.instructions <= self.budget else "OVER"
        return (self.what, f"{self.instructions:,.0f}", f"{self.budget or ''}", verdict)


def missing() -> str:
    """What keeps instructions from being counted here, or nothing."""
    if shutil.which("valgrind") is None:
        return "valgrind is not installed"
    marks = Path(os.environ.get("OPTFUSE_BUILD", "")) / "benchmarks" / "libcallgrind_marks.so"
    if not marks.is_file():
        return "libcallgrind_marks.so was not built: valgrind's headers were missing then"
    return ""


def counted(folder: Path, parameters: int = PARAMETERS) -> dict[str, float]:
    """Instructions a parameter, by the names of counted.py."""
    program = Path(__file__).with_name("counted.py")
    found = callgrind.run(program, [str(parameters)], folder, os.environ)
    return {name: counts.total() / parameters for name, counts in found.items()}


def counts(found: dict[str, float]) -> list[Count]:
    return [
        Count(
            part.what,
            sum(found[name] for name in part.plus) - sum(found[name] for name in part.minus),
            part.budget,
        )
        for part in PARTS
    ]


def section(chosen: Any) -> dict[str, Any] | None:
    title(f"Instructions for one parameter of one element, of {PARAMETERS:,} (one thread)")
    why = missing()
    if why:
        print(f"not counted: {why}")
        return None
    found = counted(chosen.out / "callgrind")
    every = counts(found)
    print(columns([("", "instructions", "budget", ""), *(one.cells() for one in every)]))
    return {
        "parameters": PARAMETERS,
        "raw": found,
        "counts": [asdict(one) for one in every],
        "gpu": launch_gpu.section(chosen.out / "callgrind-gpu", PARAMETERS),
    }
