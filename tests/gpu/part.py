# SPDX-License-Identifier: BSD-3-Clause
"""One part of tests/gpu/run: commands with a time limit, and a verdict."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

OK, FAILED, MISSED, NOT_RUN = "ok", "FAILED", "MISSED", "not run"
LAST_LINES = 25  # of what a failed part printed, shown at once
EACH = 0.1  # seconds between looks at who has ended
LEAST_SECONDS = 5.0  # with less than this left a part is not begun


@dataclass(frozen=True)
class Command:
    arguments: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Ran:
    """The outcome of one command."""

    command: Command
    status: int | None  # None: killed at the time limit
    output: str


@dataclass(frozen=True)
class Verdict:
    word: str
    why: str = ""


Judge = Callable[[list[Ran]], Verdict]


def judge_by_status(ran: list[Ran]) -> Verdict:
    """All commands succeeded; the last line that one printed is its result."""
    for one in ran:
        if one.status is None:
            return Verdict(FAILED, "it ran into its time limit")
        if one.status != 0:
            return Verdict(FAILED, f"exit status {one.status}")
    lines = [one.output.strip().splitlines()[-1] for one in ran if one.output.strip()]
    return Verdict(OK, "; ".join(dict.fromkeys(lines[-4:])))


@dataclass(frozen=True)
class Part:
    name: str
    commands: list[Command]
    limit: float  # seconds, for all of it
    log: str  # the file in which its output is kept
    judge: Judge = judge_by_status
    together: bool = False  # the commands run at once
    after: float = 0.0  # seconds to leave for the parts that follow


def start(
    command: Command, environment: Mapping[str, str], output: Path
) -> subprocess.Popen[bytes]:
    with output.open("wb") as file:
        return subprocess.Popen(
            command.arguments,
            env={**environment, **command.variables},
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that the whole family can be ended
        )


def finish(processes: list[subprocess.Popen[bytes]], until: float) -> list[int | None]:
    """Their exit statuses, None of those that had to be ended."""
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        time.sleep(EACH)
    statuses = [process.poll() for process in processes]
    for process, status in zip(processes, statuses, strict=True):
        if status is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return statuses


def run_commands(
    part: Part, environment: Mapping[str, str], seconds: float, folder: Path
) -> list[Ran]:
    """Runs them one after the other, up to the first that is ended, or together. Each prints to a
    file in the folder, which is left there if this run is ended before they are."""
    until, ran = time.monotonic() + seconds, []
    for group in [part.commands] if part.together else [[one] for one in part.commands]:
        outputs = [folder / f"now-{i}.log" for i in range(len(group))]
        pairs = zip(group, outputs, strict=True)
        statuses = finish([start(one, environment, output) for one, output in pairs], until)
        for one, status, output in zip(group, statuses, outputs, strict=True):
            ran.append(Ran(one, status, output.read_text("utf-8", errors="replace")))
            output.unlink()
        if None in statuses:
            break
    return ran


def shown(ran: list[Ran]) -> str:
    """The end of what failed, for the terminal."""
    failed = [one for one in ran if one.status != 0] or ran
    return "\n".join("\n".join(one.output.splitlines()[-LAST_LINES:]) for one in failed[:2])
