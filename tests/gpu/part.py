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
EACH = 0.1  # seconds between looks at what commands have printed
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


class Listener:
    """Passes on what the commands print, while they print it."""

    def __init__(self, outputs: list[Path], hear: Callable[[bytes], None]) -> None:
        self.heard = dict.fromkeys(outputs, 0)
        self.hear = hear

    def listen(self) -> None:
        for path, n in self.heard.items():
            if path.exists() and path.stat().st_size > n:
                with path.open("rb") as file:
                    file.seek(n)
                    new = file.read()
                self.heard[path] += len(new)
                self.hear(new)


def finish(
    processes: list[subprocess.Popen[bytes]], until: float, listener: Listener
) -> list[int | None]:
    """Their exit statuses, None of those that had to be ended."""
    while any(process.poll() is None for process in processes) and time.monotonic() < until:
        time.sleep(EACH)
        listener.listen()
    statuses = [process.poll() for process in processes]
    for process, status in zip(processes, statuses, strict=True):
        if status is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    listener.listen()
    return statuses


def run_commands(
    part: Part,
    environment: Mapping[str, str],
    seconds: float,
    folder: Path,
    hear: Callable[[bytes], None] = lambda new: None,
) -> list[Ran]:
    """Runs them one after the other, up to the first that is ended, or together."""
    until = time.monotonic() + seconds
    outputs = [folder / f"output-{i}.txt" for i in range(len(part.commands))]
    listener = Listener(outputs, hear)
    statuses: list[int | None] = []
    if part.together:
        pairs = zip(part.commands, outputs, strict=True)
        processes = [start(command, environment, output) for command, output in pairs]
        statuses = finish(processes, until, listener)
    else:
        for command, output in zip(part.commands, outputs, strict=True):
            statuses += finish([start(command, environment, output)], until, listener)
            if statuses[-1] is None:
                break
    texts = [output.read_text("utf-8", errors="replace") for output in outputs[: len(statuses)]]
    done = zip(part.commands, statuses, texts, strict=False)
    return [Ran(command, status, text) for command, status, text in done]


def shown(ran: list[Ran]) -> str:
    """The end of what failed, for the terminal."""
    failed = [one for one in ran if one.status != 0] or ran
    return "\n".join("\n".join(one.output.splitlines()[-LAST_LINES:]) for one in failed[:2])
