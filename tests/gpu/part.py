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
LEAST_SECONDS = 5.0  # with less than this left a part is not begun


@dataclass(frozen=True)
class Command:
    arguments: list[str]
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Ran:
    """What came of one command."""

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


def finish(process: subprocess.Popen[bytes], until: float) -> int | None:
    """Its exit status, or None if it had to be ended."""
    try:
        return process.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def run_commands(
    part: Part, environment: Mapping[str, str], seconds: float, folder: Path
) -> list[Ran]:
    """Runs them one after the other, up to the first that fails, or together."""
    until = time.monotonic() + seconds
    outputs = [folder / f"output-{i}.txt" for i in range(len(part.commands))]
    statuses: list[int | None] = []
    if part.together:
        pairs = zip(part.commands, outputs, strict=True)
        processes = [start(command, environment, output) for command, output in pairs]
        statuses = [finish(process, until) for process in processes]
    else:
        for command, output in zip(part.commands, outputs, strict=True):
            statuses.append(finish(start(command, environment, output), until))
            if statuses[-1] is None:
                break
    texts = [output.read_text("utf-8", errors="replace") for output in outputs[: len(statuses)]]
    done = zip(part.commands, statuses, texts, strict=False)
    return [Ran(command, status, text) for command, status, text in done]


def shown(ran: list[Ran]) -> str:
    """The end of what failed, for the terminal."""
    failed = [one for one in ran if one.status != 0] or ran
    return "\n".join("\n".join(one.output.splitlines()[-LAST_LINES:]) for one in failed[:2])
