# SPDX-License-Identifier: BSD-3-Clause
"""What callgrind has counted, read from its files."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

TITLE = "desc: Trigger: Client Request: "
NAMED = re.compile(r"^(ob|fn|cob|cfn)=\((\d+)\)(?: (.*))?$")
COST = re.compile(r"^[+\-*\d]\S* (\d+)$")

Function = tuple[str, str]  # file of the object, name


@dataclass
class Counts:
    """One file: instructions of each function itself, and of its calls with all that
    they called. "" as the title: what no client asked for."""

    title: str = ""
    own: Counter[Function] = field(default_factory=Counter)
    called: Counter[tuple[Function, Function]] = field(default_factory=Counter)
    calls: Counter[tuple[Function, Function]] = field(default_factory=Counter)

    def total(self) -> int:
        return sum(self.own.values())

    def without(self, leave_out: Callable[[Function], bool]) -> int:
        """Instructions, but for those of calls from other functions to these. Where they
        call others that call them back, what is called back is taken off twice."""
        return self.total() - sum(
            cost
            for (caller, callee), cost in self.called.items()
            if leave_out(callee) and not leave_out(caller)
        )

    def calls_of(self, name: str) -> int:
        """Of functions of this name, in C or in whatever C++ class."""
        wanted = re.compile(rf"(^|::){name}(\(|$)")
        return sum(n for (_, callee), n in self.calls.items() if wanted.search(callee[1]))


def read(lines: Iterator[str]) -> Counts:
    """Names are written once and abbreviated from then on. The line after `calls=` is
    the cost of the calls, of all others that of the function itself."""
    counts, names, now = Counts(), dict[tuple[str, str], str](), dict[str, str]()
    calls = 0
    for line in lines:
        named, cost = NAMED.match(line), COST.match(line)
        if line.startswith(TITLE):
            counts.title = line.removeprefix(TITLE).strip()
        elif named:
            what, number, name = named.groups()
            key = (what.removeprefix("c"), number)
            names[key] = name if name is not None else names[key]
            now[what] = names[key]
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


def run(
    program: Path, arguments: list[str], folder: Path, environment: Mapping[str, str]
) -> dict[str, Counts]:
    """Runs a Python program whose parts are between marks; by their titles. The files
    stay in the folder, for callgrind_annotate."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("callgrind.out*"):
        old.unlink()
    command = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no"]
    command += [f"--callgrind-out-file={folder / 'callgrind.out'}"]
    command += [sys.executable, str(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(environment))
    if done.returncode != 0:
        raise RuntimeError(f"{program.name} failed under valgrind:\n{done.stdout}{done.stderr}")
    found = []
    for path in folder.glob("callgrind.out.*"):
        with path.open(encoding="utf-8") as lines:
            found.append(read(lines))
    return {counts.title: counts for counts in found if counts.title}
