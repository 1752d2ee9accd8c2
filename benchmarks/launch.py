# SPDX-License-Identifier: BSD-3-Clause
"""Section launch: the instructions that the machinery around an update takes on the host, for a
CPU and for a GPU, counted by valgrind's callgrind. Unlike times they hardly change from run to
run. The GPU is the one that the tests play (tests/device); its own work is left out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from figures import columns, title

PARAMETERS = 1000


class Part(NamedTuple):
    what: str
    names: tuple[str, ...]  # of counted.py: the first count, and those to subtract
    budget: float | None = None  # a share of WHOLE: compilers and libraries move both


WHOLE = "step, fused=True"
HOOK = ("backward, backward fusion", "backward, no optimizer")
SHARDED_HOOK = ("sharded backward, backward fusion", "sharded backward, fused=True")
DETACH = ("detach, pending", "detach, nothing pending")
PARTS = (
    Part("gradient hook, above the update", (*HOOK, "flush"), 0.125),
    Part("gradient hook, with the update", HOOK, 0.165),
    Part("first use by detach, above the update", (*DETACH, "flush"), 0.01),
    Part("first use by detach, with the update", DETACH, 0.033),
    Part("first use by view, with the update", ("view, pending", "view, nothing pending"), 0.033),
    Part("step() in forward mode, in C", ("step in C",), 0.047),
    Part("step() in forward mode, in all", ("step",), 0.059),
    Part("step() in backward mode, in all", ("step, backward fusion",), 0.022),
    Part("zero_grad() in forward mode", ("zero_grad",), 0.022),
    Part("zero_grad() in backward mode", ("zero_grad, backward fusion",), 0.005),
    Part("zero_grad() of fused=True", ("zero_grad, fused=True",)),
    Part("torch's clip_grad_norm_ in forward mode", ("clip",), 0.063),
    Part("GradScaler.unscale_() in forward mode", ("unscale",), 0.07),
    Part("GradScaler.unscale_() with fused=True", ("unscale, fused=True",)),
    Part("GradScaler.step() in forward mode", ("scaled step",), 0.069),
    Part("GradScaler.step() with fused=True", ("scaled step, fused=True",)),
    Part("GradScaler.update()", ("scaler's update",)),
    Part("update_parameters() of an average, in forward mode", ("average",), 0.08),
    Part("FSDP2's gradient hook, with the update", SHARDED_HOOK),
    Part("FSDP2's step() in forward mode", ("sharded step, forward fusion",)),
    Part("FSDP2's step() in backward mode", ("sharded step, backward fusion",)),
    Part("FSDP2's step() of fused=True", ("sharded step, fused=True",)),
    Part("FSDP2's backward(), with fused=True", ("sharded backward, fused=True",)),
    Part("the update itself, launched by flush()", ("flush",), 0.04),
    Part("step() of fused=True, with the update", (WHOLE,)),
)


class Count(NamedTuple):
    what: str
    instructions: float  # a parameter
    share: float  # of WHOLE, in the same run
    budget: float | None

    def cells(self) -> tuple[str, ...]:
        verdict = "" if self.budget is None else "within" if self.share <= self.budget else "OVER"
        budget = "" if self.budget is None else percent(self.budget)
        counted = (f"{self.instructions:,.0f}", percent(round(self.share, 3)))
        return (self.what, *counted, budget, verdict)


def percent(share: float) -> str:
    return f"{100 * share:g} %"


def counts(found: dict[str, float]) -> list[Count]:
    def count(part: Part, n: float, *rest: float) -> Count:
        instructions = n - sum(rest)
        return Count(part.what, instructions, instructions / found[WHOLE], part.budget)

    return [count(part, *(found[name] for name in part.names)) for part in PARTS]


NEEDED = {
    "OPTFUSE_LIBRARY": "shim/liboptfuse_torch-*-guards.so",
    "OPTFUSE_FAKE_CUDA": "tests/device/libfake_cuda.so",
    "OPTFUSE_CUDA_LIBRARY": "tests/device/libfake_optfuse_cuda.so",
}
# Functions that only a GPU or this build needs: the played device, a launch as its driver has it
# (and what that tells the device), and the switches of guards.
LEFT_OUT = ("host_launch", "tell", "of_guard_enabled")
PLAYED = Path(NEEDED["OPTFUSE_FAKE_CUDA"]).name
LAUNCHES, RECORDS, WAITS = "host_launch", "GuardImpl::record", "GuardImpl::block"
STOCK = "fused=True"
WAYS = ("forward fusion", "backward fusion", "side stream")
PHASES = ("backward", "step", "use", "use again")


@dataclass(frozen=True)
class HostWork:
    """Instructions a parameter above those without an optimizer, by phase; and what one
    iteration sends to the device, of all parameters together."""

    way: str
    instructions: dict[str, float]
    launches: int
    events: int
    waits: int

    def cells(self) -> tuple[str, ...]:
        counted = (*self.instructions.values(), sum(self.instructions.values()))
        sent = (str(self.launches), str(self.events), str(self.waits))
        return (self.way, *(f"{n:,.0f}" for n in counted), *sent)


def host_work(found: dict[str, Counts], n: int) -> list[HostWork]:
    """fused=True's backward and uses are those without an optimizer."""

    def is_left_out(function: Function) -> bool:
        return function[0] == PLAYED or function[1] in LEFT_OUT

    def instructions(way: str, phase: str) -> float:
        counted = found[f"{phase}, {way}"].without(is_left_out)
        bare = 0 if phase == "step" else found[f"{phase}, {STOCK}"].without(is_left_out)
        return (counted - bare) / n

    def calls(way: str, name: str) -> int:
        return sum(found[f"{phase}, {way}"].calls_of(name) for phase in PHASES)

    return [
        HostWork(
            way,
            {phase: instructions(way, phase) for phase in PHASES},
            *(calls(way, name) - calls(STOCK, name) for name in (LAUNCHES, RECORDS, WAITS)),
        )
        for way in (STOCK, *WAYS)
    ]


TITLE = "desc: Trigger: Client Request: "
NAMED = re.compile(r"^(ob|fn|cob|cfn)=\((\d+)\)(?: (.*))?$")
COST = re.compile(r"^[+\-*\d]\S* (\d+)$")

Function = tuple[str, str]  # file of the object, name


@dataclass
class Counts:
    """One file: instructions of each function itself, and of its calls with all that they
    called. Without a title no client asked for the file."""

    title: str = ""
    own: Counter[Function] = field(default_factory=Counter)
    called: Counter[tuple[Function, Function]] = field(default_factory=Counter)
    calls: Counter[tuple[Function, Function]] = field(default_factory=Counter)

    def total(self) -> int:
        return sum(self.own.values())

    def without(self, leave_out: Callable[[Function], bool]) -> int:
        """Instructions, but for those of calls from other functions to these. Where these call
        others that call them back, what is called back is taken off twice."""
        edges = self.called.items()
        off = (n for (by, to), n in edges if leave_out(to) and not leave_out(by))
        return self.total() - sum(off)

    def calls_of(self, name: str) -> int:
        """Calls of functions of this name, in C or in whatever C++ class."""
        wanted = re.compile(rf"(^|::){name}(\(|$)")
        return sum(n for (_, callee), n in self.calls.items() if wanted.search(callee[1]))


def read(lines: Iterator[str]) -> Counts:
    """A name is written once and abbreviated from then on. The line after `calls=` is the cost
    of the calls, every other one that of the function itself."""
    counts, names, now = Counts(), dict[tuple[str, str], str](), dict[str, str]()
    calls = 0
    for line in lines:
        named, cost = NAMED.match(line), COST.match(line)
        if line.startswith(TITLE):
            counts.title = line.removeprefix(TITLE).strip()
        elif named:
            what, number, name = named.groups()
            key = (what.removeprefix("c"), number)
            now[what] = names[key] = names[key] if name is None else name
        elif line.startswith("calls="):
            calls = int(line.removeprefix("calls=").split()[0])
        elif cost and calls:
            callee = (Path(now.pop("cob", now["ob"])).name, now["cfn"])
            edge = ((Path(now["ob"]).name, now["fn"]), callee)
            counts.called[edge] += int(cost[1])
            counts.calls[edge] += calls
            calls = 0
        elif line.startswith("totals: ") and int(line.split()[1]) != counts.total():
            raise RuntimeError(f"callgrind's file was misread: {counts.total()} is not its {line}")
        elif cost:
            counts.own[Path(now["ob"]).name, now["fn"]] += int(cost[1])
    return counts


def count(where: str, out: Path, environment: Mapping[str, str], n: int) -> dict[str, Counts]:
    """Counts of callgrind between the marks of counted.py, by their titles. Its files stay, for
    callgrind_annotate."""
    folder = out / f"callgrind-{where}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("callgrind.out*"):
        old.unlink()
    command = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no"]
    command += [f"--callgrind-out-file={folder / 'callgrind.out'}"]
    command += [sys.executable, str(Path(__file__).with_name("counted.py")), where, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(environment))
    if done.returncode != 0:
        raise RuntimeError(f"counted.py failed under valgrind:\n{done.stdout}{done.stderr}")
    files = [path.read_text("utf-8") for path in folder.glob("callgrind.out.*")]
    found = [read(iter(text.splitlines(keepends=True))) for text in files]
    return {counts.title: counts for counts in found if counts.title}


def section(chosen: Any) -> dict[str, Any] | None:
    n = 50 if chosen.smoke else PARAMETERS
    build = Path(os.environ.get("OPTFUSE_BUILD", ""))
    title(f"Instructions for one parameter of one element, of {n:,} (one thread)")
    marks = build / "benchmarks" / "libcallgrind_marks.so"
    if shutil.which("valgrind") is None or not marks.is_file():
        print("not counted: valgrind is missing, or its headers were when optfuse was built")
        return None
    found = count("cpu", chosen.out, dict(os.environ), n)
    every = counts({name: one.total() / n for name, one in found.items()})
    rows = [("", "instructions", "of fused=True's step()", "budget", "")]
    print(columns(rows + [one.cells() for one in every]))
    ways = ("by itself", "recorded")
    one_tensor = {way: found[f"one tensor, {way}"].total() for way in ways}
    print(f"step() of AdamW's loop, one tensor: {one_tensor}")
    figures = {"parameters": n, "counts": [one._asdict() for one in every]}
    figures["one_tensor"] = one_tensor
    title(f"Host instructions for a GPU, of {n:,} parameters of one element, on a played one")
    absent = [pattern for pattern in NEEDED.values() if not list(build.glob(pattern))]
    if absent:
        print(f"not counted: {absent[0]} is not there; tests/run builds it where nvcc is found")
        return figures
    paths = {name: str(next(build.glob(pattern))) for name, pattern in NEEDED.items()}
    work = host_work(count("gpu", chosen.out, {**os.environ, **paths}, n), n)
    rows = [("", *PHASES, "in all", "launches", "events", "waits")]
    print(columns(rows + [one.cells() for one in work]))
    return {**figures, "host_work": work}
